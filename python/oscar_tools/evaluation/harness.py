"""One run of the harness: a benchmark, a seed, a server. Interrupted runs continue from their predictions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.data import explain_hub_failure, read_rows
from oscar_tools.calibration.errors import DataError, HarnessError
from oscar_tools.evaluation.answers import count
from oscar_tools.evaluation.benchmarks import Benchmark
from oscar_tools.evaluation.same_task import REMEDY, RESULT, SERVER, SNAPSHOT, TASK, check_same_task

PYTHON_VARIABLE = "OSCAR_HARNESS_PYTHON"
SCRIPT = Path(__file__).with_name("evalscope_task.py")


@dataclass(frozen=True)
class BenchmarkRun:
    """One run.

    Attributes:
        benchmark: what is asked.
        settings: sampling, generation length, concurrency.
        url: base address of the server.
        seed: of the sampling.
        folder: for this run alone.
        local: local copy of the data set, with the columns of the real one; None takes it from the hub.
        limit: questions at most.
        server: what answers depend on besides, as JSON values; runs of other values are not mixed.
        facts: what the server says of itself, as JSON values; kept with the result.
    """

    benchmark: Benchmark
    settings: ModelSettings
    url: str
    seed: int
    folder: Path
    local: Path | None = None
    limit: int | None = None
    server: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def harness_python() -> str:
    """The interpreter that has the harness: OSCAR_HARNESS_PYTHON, else this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def check_harness() -> None:
    """Make sure the harness is installed. It is not imported, which takes as long as a small benchmark.

    Raises:
        HarnessError: it is not installed.
    """
    found = "from importlib.util import find_spec; raise SystemExit(find_spec('evalscope') is None)"
    command = [harness_python(), "-c", found]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise HarnessError(
            f"{harness_python()} has no evalscope: pip install 'sglang-oscar[eval]', or install it elsewhere and name "
            f"that interpreter in {PYTHON_VARIABLE}"
        )


def run(wanted: BenchmarkRun) -> dict[str, Any]:
    """Run the harness, or return what an earlier run left.

    Returns:
        ``score`` in percent, ``scores``: question -> score in [0, 1], ``answers``: how many were ``asked``,
        ``answered`` and ``cut_off``, ``server``: what it says of itself, ``benchmark``, ``seed``.

    Raises:
        DataError: the data set cannot be had.
        HarnessError: the harness failed, or the folder holds a run with other settings.
    """
    done, task = wanted.folder / RESULT, wanted.folder / TASK
    wanted.folder.mkdir(parents=True, exist_ok=True)
    check_same_task(wanted.folder, task_config(wanted))
    if done.exists():
        return finished(done)
    if wanted.local is not None:
        stage(wanted)
    config = task_config(wanted)
    task.write_text(json.dumps(config, indent=1), encoding="utf-8")
    log = wanted.folder / "harness.log"
    env = os.environ | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    env.pop("PYTHONPATH", None)
    with log.open("ab") as output:
        status = subprocess.run(
            [harness_python(), str(SCRIPT), str(task)], stdout=output, stderr=subprocess.STDOUT, env=env, check=False
        ).returncode
    if status:
        raise _failure(wanted, status, log)
    result = read_result(wanted)
    write_text_atomically(done, json.dumps(result, indent=1) + "\n")
    return result


def task_config(wanted: BenchmarkRun) -> dict[str, Any]:
    """The harness's configuration of a run, and under :data:`SERVER` what it does not see. Writes and reads no data."""
    settings, benchmark = wanted.settings, wanted.benchmark
    data = dict(benchmark.args)
    if wanted.local is not None:
        data |= {"local_path": str(_staged(wanted)), "eval_split": benchmark.split}
        if "subset_list" in data or benchmark.task in ("humaneval", "ruler_niah"):
            data["subset_list"] = ["default"]
    elif benchmark.hub:
        data["dataset_id"] = benchmark.hub
    sampling = {name: value for name, value in settings.sampling.items() if name != "top_k"}
    generation: dict[str, Any] = {"max_tokens": settings.tokens_for(benchmark.name), "seed": wanted.seed, **sampling}
    if "top_k" in settings.sampling:
        generation["extra_body"] = {"top_k": int(settings.sampling["top_k"])}
    generation |= {"timeout": 24 * 3600, "retries": 3}
    folder = str(wanted.folder.resolve())
    begun = (wanted.folder / SNAPSHOT).exists()
    return {
        "model": settings.model,
        "model_id": settings.name,
        "api_url": f"{wanted.url}/v1",
        "api_key": "none",
        "eval_type": "openai_api",
        "datasets": [benchmark.task],
        "dataset_args": {benchmark.task: data},
        "dataset_hub": "huggingface",
        "generation_config": generation,
        "eval_batch_size": settings.concurrency,
        "limit": wanted.limit,
        "seed": wanted.seed,
        "work_dir": folder,
        "use_cache": folder if begun else None,
        # The harness takes another port for another run. Predictions are kept, scoring is cheap.
        "rerun_review": begun,
        "no_timestamp": True,
        "collect_perf": False,
        SERVER: wanted.server,
    }


def _staged(wanted: BenchmarkRun) -> Path:
    return (wanted.folder / "data").resolve()


def stage(wanted: BenchmarkRun) -> Path:
    """Put a local data set where the harness looks for it, as ``<split>.parquet`` in a folder of its own.

    Parquet keeps types: read back from JSON lines, the dates of LiveCodeBench would no longer be text.

    Raises:
        DataError: no such file, or rows without the columns of the real data set.
    """
    assert wanted.local is not None
    rows = list(read_rows(wanted.local))
    if not rows:
        raise DataError(f"{wanted.local}: holds no rows")
    for number, row in enumerate(rows, 1):
        missing = [column for column in wanted.benchmark.columns if column not in row]
        if missing:
            raise DataError(f"{wanted.local}: row {number} lacks {missing[0]!r}, a column of {wanted.benchmark.title}")
    folder = _staged(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{column: row[column] for column in wanted.benchmark.columns} for row in rows])
    parquet.write_table(table, folder / f"{wanted.benchmark.split}.parquet")
    return folder


def read_result(wanted: BenchmarkRun) -> dict[str, Any]:
    """Scores of a finished run, question by question, from the harness's reviews.

    Raises:
        HarnessError: it left none.
    """
    scores: dict[str, float] = {}
    for path in sorted((wanted.folder / "reviews").rglob("*.jsonl")):
        # Not splitlines(): answers may hold other characters that end a line, which JSON leaves as they are.
        for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
            review = json.loads(line)
            score = review["sample_score"]["score"]
            value = score["value"]
            name = score.get("main_score_name") or next(iter(value))
            scores[f"{path.stem}/{review['index']}"] = float(value[name])
    if not scores:
        raise HarnessError(f"{wanted.folder}: the harness left no reviews; see {wanted.folder / 'harness.log'}")
    return {
        "benchmark": wanted.benchmark.name,
        "seed": wanted.seed,
        "score": 100 * sum(scores.values()) / len(scores),
        "scores": scores,
        "answers": count(wanted.folder, len(scores)).to_json(),
        "server": wanted.facts,
    }


def finished(path: Path) -> dict[str, Any]:
    """The result of a finished run.

    Raises:
        HarnessError: it was left by a release that did not ask the server and did not count answers.
    """
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not {"answers", "server"} <= result.keys():
        raise HarnessError(
            f"{path}: is of a release that did not count answers that were cut off, nor ask the server what its cache "
            f"is; {REMEDY}"
        )
    return result


def _failure(wanted: BenchmarkRun, status: int, log: Path) -> Exception:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    hub = wanted.benchmark.hub
    # The harness asks the server by way of openai, whose errors of the connection are not the hub's.
    asked = "openai." in last or "APIConnectionError" in last
    words = ("huggingface.co", "Dataset", "gated", "Connection", "hub")
    if wanted.local is None and not asked and any(word in last for word in words):
        return DataError(explain_hub_failure(hub, RuntimeError(last), "EVAL_DATA"))
    return HarnessError(f"the harness ended with status {status}; its log {log} ends with: {last[:300]}")
