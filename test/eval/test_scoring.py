"""The harness credits right answers and no wrong ones, on every benchmark, from local data in the real formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oscar_rotation.model_table import model_settings
from oscar_tools.evaluation.benchmarks import BENCHMARKS
from oscar_tools.evaluation.harness import BenchmarkRun, run
from oscar_tools.evaluation.ruler import write_niah
from support.answering import answering_endpoint
from support.benchmark_data import ROWS, write_rows

PATIENT = {"lcb_v6": {"review_timeout": 600}}
"""Arguments of the harness: LiveCodeBench gives an answer six seconds, which a busy machine needs to start it."""
EXPECTED = {"gpqa": 75, "humaneval": 50, "lcb_v6": 50, "aime25": 200 / 3, "math500": 80, "niah_4k": 50}


@pytest.mark.parametrize("name", EXPECTED)
def test_right_answers_count(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.jsonl"
    if name in ROWS:
        write_rows(path, ROWS[name]())
    else:
        write_niah(path, 600, 4, lambda text: len(text.split()))
    settings = model_settings("qwen3-8B").overridden(concurrency=2)
    benchmark = replace(BENCHMARKS[name], args=BENCHMARKS[name].args | PATIENT.get(name, {}))
    with answering_endpoint() as (url, asked):
        result = run(BenchmarkRun(benchmark, settings, url, 7, tmp_path / "run", local=path))
    assert result["score"] == pytest.approx(EXPECTED[name])
    assert len(asked) == len(result["scores"])
    for request in asked:
        sampling = [request[key] for key in ("temperature", "top_p", "top_k", "seed", "max_tokens")]
        assert sampling == [0.6, 0.95, 20, 7, 32768]
