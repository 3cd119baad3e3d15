"""The benchmarks, by name: how the harness calls them and where their data sets are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: as in commands and folders.
        title: heading in tables.
        task: the harness's name for it.
        hub: the data set on the Hugging Face hub.
        split: split that is asked.
        args: the harness's arguments for the hub's data set.
        columns: what a row of a local copy must have.
        context: prompt length in tokens, for RULER-NIAH.
        runs_code: whether answers are executed.
    """

    name: str
    title: str
    task: str
    hub: str
    split: str
    columns: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    runs_code: bool = False


_CODE = "marianna13/livecodebench_code_generation_lite_parquet"
"""The harness's copy of livecodebench/code_generation_lite, which is a script that `datasets` no longer runs."""
_LCB = (
    "question_content",
    "starter_code",
    "public_test_cases",
    "private_test_cases",
    "metadata",
    "contest_date",
)
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_HUMANEVAL = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
_MATH = ("problem", "answer", "solution", "level", "unique_id")
_RULER = ("index", "input", "outputs", "length")

_ALL = [
    Benchmark("gpqa", "GPQA", "gpqa_diamond", "Idavidrein/gpqa", "train", _GPQA, {"subset_list": ["gpqa_diamond"]}),
    Benchmark("humaneval", "HumanE", "humaneval", "openai/openai_humaneval", "test", _HUMANEVAL, runs_code=True),
    Benchmark("lcb_v6", "LCB v6", "live_code_bench", _CODE, "test", _LCB, {"subset_list": ["v6"]}, runs_code=True),
    Benchmark(
        "lcb_v6_128k", "LCB v6 (128K)", "live_code_bench", _CODE, "test", _LCB, {"subset_list": ["v6"]}, runs_code=True
    ),
    Benchmark("aime25", "AIME25", "aime25", "math-ai/aime25", "test", ("problem", "answer")),
    Benchmark("math500", "MATH500", "math_500", "HuggingFaceH4/MATH-500", "test", _MATH),
]
_NIAH = [
    Benchmark(f"niah_{k}k", f"NIAH {k}k", "ruler_niah", "", "test", _RULER, context=k * 1024)
    for k in (4, 8, 16, 32, 64, 128)
]

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in [*_ALL, *_NIAH]}
"""Name -> benchmark."""

PAPER_SUITE = ("gpqa", "humaneval", "lcb_v6", "aime25", "math500")
"""The five benchmarks of the paper's table 2."""

NIAH_SUITE = tuple(benchmark.name for benchmark in _NIAH)
"""The context lengths of the paper's table 3."""
