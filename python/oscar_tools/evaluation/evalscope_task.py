"""Run one harness task from a JSON file: ``python evalscope_task.py TASK.json``.

Imports the harness and nothing of this project, so it runs under any interpreter that has the harness. The task that
the harness lacks, RULER-NIAH, is defined here.
"""

import json
import sys
from typing import Any


def register_ruler() -> None:
    """Teach the harness RULER's needle-in-a-haystack rows: all ``outputs`` must occur in the answer."""
    from evalscope.api.benchmark import BenchmarkMeta, DefaultDataAdapter
    from evalscope.api.dataset import Sample
    from evalscope.api.messages import ChatMessageUser
    from evalscope.api.metric import Score
    from evalscope.api.registry import register_benchmark

    @register_benchmark(
        BenchmarkMeta(
            name="ruler_niah",
            pretty_name="RULER-NIAH",
            description="Needle in a haystack, RULER rows",
            dataset_id="ruler_niah",
            subset_list=["default"],
            metric_list=["acc"],
            eval_split="test",
            prompt_template="{question}",
        )
    )
    class RulerAdapter(DefaultDataAdapter):  # type: ignore[misc]
        def record_to_sample(self, record: dict[str, Any]) -> Any:
            return Sample(input=[ChatMessageUser(content=record["input"])], target=json.dumps(record["outputs"]))

        def match_score(
            self, original_prediction: str, filtered_prediction: str, reference: str, task_state: Any
        ) -> Any:
            wanted = json.loads(reference)
            found = [output for output in wanted if output.lower() in filtered_prediction.lower()]
            score = Score(extracted_prediction=filtered_prediction, prediction=original_prediction)
            score.value = {"acc": len(found) / len(wanted)}
            score.main_score_name = "acc"
            return score


def main(path: str) -> None:
    """Run the task; its results lie under the task's ``work_dir``."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    # For comparison with later runs; the harness knows no such setting.
    config.pop("server", None)
    from evalscope import TaskConfig, run_task

    if "ruler_niah" in config["datasets"]:
        register_ruler()
    run_task(TaskConfig(**config))


if __name__ == "__main__":
    main(sys.argv[1])
