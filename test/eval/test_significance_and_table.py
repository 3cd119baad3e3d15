"""Means, paired tests and tables from finished runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from oscar_tools.calibration.errors import HarnessError
from oscar_tools.evaluation.runner import scores_of
from oscar_tools.evaluation.significance import mean_and_std, paired_test
from oscar_tools.evaluation.table import collect, markdown, warnings, write_tables


def test_mean_and_sample_deviation() -> None:
    # AIME25 of OSCAR on Qwen3-4B-Thinking, the five runs of the paper's table 22: 64.00 +- 3.65.
    mean, std = mean_and_std([63.33, 63.33, 63.33, 60.00, 70.00])
    assert (round(mean, 2), round(std or 0, 2)) == (64.00, 3.65)
    assert mean_and_std([5.0]) == (5.0, None)


def test_paired_test_equals_all_sign_flips() -> None:
    first = {str(i): float(x) for i, x in enumerate([1, 1, 1, 0, 1, 0, 1, 1])}
    second = {str(i): float(x) for i, x in enumerate([0, 0, 1, 0, 0, 0, 1, 0])}
    differences = np.array([second[key] - first[key] for key in first])
    flipped = [np.mean(differences * signs) for signs in itertools.product((1, -1), repeat=8)]
    expected = np.mean(np.abs(flipped) >= abs(differences.mean()) - 1e-12)
    test = paired_test([first], [second])
    assert test.difference == pytest.approx(-0.5)
    assert test.p_value == pytest.approx(expected)
    assert test.low is not None
    assert test.high is not None
    assert -1 < test.low < -0.5 < test.high <= 0


def test_seeds_are_averaged_before_questions_are_compared() -> None:
    runs = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]
    test = paired_test(runs, [{"a": 1.0, "b": 1.0}])
    assert (test.questions, test.difference) == (2, 0.75)
    same = paired_test(runs, runs)
    assert (same.difference, same.p_value) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no question in common"):
        paired_test([{"a": 1.0}], [{"b": 1.0}])


def test_a_constant_difference_is_not_a_crash() -> None:
    ones, zeros = {str(i): 1.0 for i in range(6)}, {str(i): 0.0 for i in range(6)}
    test = paired_test([ones], [zeros])
    assert (test.difference, test.low, test.p_value) == (-1.0, None, 2 * 0.5**6)


BITS = {"bf16": 16.0, "oscar": 2.28, "naive": 2.25}


def result(
    folder: Path, benchmark: str, method: str, seed: int, scores: list[float], answered: int | None = None
) -> None:
    path = folder / f"_eval_{benchmark}_{method}" / f"seed{seed}" / "result.json"
    path.parent.mkdir(parents=True)
    answers = {str(i): score for i, score in enumerate(scores)}
    score = 100 * sum(scores) / len(scores)
    answered = len(scores) if answered is None else answered
    server = {"title": "BF16", "bits": BITS[method], "int2": None if method == "bf16" else {"recipe": "paper"}}
    left = {"benchmark": benchmark, "seed": seed, "score": score, "scores": answers, "server": server}
    left["answers"] = {"asked": len(scores), "answered": answered, "cut_off": len(scores) - answered}
    path.write_text(json.dumps(left))


def test_table_in_the_papers_form(tmp_path: Path) -> None:
    for seed in (0, 1):
        result(tmp_path, "gpqa", "bf16", seed, [1, 1, 1, seed])
        result(tmp_path, "gpqa", "oscar", seed, [1, 1, 0, 0])
    result(tmp_path, "aime25", "bf16", 0, [1, 0])
    result(tmp_path, "aime25", "oscar", 0, [1, 1])
    result(tmp_path, "gpqa", "naive", 0, [0, 0, 0, 0])
    titles = {"bf16": "plain", "naive": "Naive INT2", "oscar": "OSCAR"}
    rows = [(name, title, tmp_path) for name, title in titles.items()]
    results = collect(rows, ["gpqa", "aime25"])
    as_json, as_markdown = write_tables(tmp_path, "results", results, "model: accuracy")
    assert json.loads(as_json.read_text()) == results
    lines = as_markdown.read_text().splitlines()
    assert lines[2] == "| Method | BPE | GPQA | AIME25 | Mean | Drop |"
    assert lines[4] == "| BF16 | 16.00 | 87.50 ± 17.68 | 50.00 | 68.75 |  |"
    assert lines[5] == "| Naive INT2 | 2.25 | 0.00 |  |  |  |"
    assert lines[6] == "| OSCAR | 2.28 | 50.00 ± 0.00 | 100.00 | 75.00 | +6.25 |"
    assert "| BF16 | GPQA | 8 | 8 | 0 |" in lines
    assert any(line.startswith("| OSCAR | GPQA | 4 | -37.50 |") for line in lines)
    assert "Warning" not in as_markdown.read_text()
    assert "Paired differences from BF16" in as_markdown.read_text()
    alone = collect(rows[2:], ["gpqa"])
    assert "paired" not in alone["rows"][0]
    assert "Paired" not in markdown(alone, "x")


def test_no_score_stands_where_nothing_was_answered(tmp_path: Path) -> None:
    result(tmp_path, "gpqa", "oscar", 0, [0] * 10, answered=0)
    result(tmp_path, "aime25", "oscar", 0, [1] * 50, answered=49)
    results = collect([("oscar", "OSCAR", tmp_path)], ["gpqa", "aime25"])
    lines = markdown(results, "x").splitlines()
    assert lines[4] == "| OSCAR | 2.28 | no answer | 100.00 |  |  |"
    assert "| OSCAR | GPQA | 10 | 0 | 10 |" in lines
    assert (results["rows"][0]["scores"]["gpqa"]["cut_off"], results["rows"][0]["mean"]) == (10, None)
    (empty,) = warnings(results, only_empty=True)
    assert empty.startswith("OSCAR, GPQA: all answers were cut off: this is no score; raise --max-tokens")
    assert "Warning: OSCAR, AIME25: 1 of 50 answers were cut off and count as they stand; raise --max-tokens." in lines


def test_results_without_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "_eval_gpqa_oscar/seed0/result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"benchmark": "gpqa", "seed": 0, "score": 0.0, "scores": {"0": 0.0}}))
    with pytest.raises(HarnessError, match=r"did not count answers that were cut off.*remove the folder"):
        collect([("oscar", "OSCAR", tmp_path)], ["gpqa"])


def test_only_the_asked_for_seeds_count(tmp_path: Path) -> None:
    for seed in range(3):
        result(tmp_path, "gpqa", "bf16", seed, [1, 0])
    assert [run["seed"] for run in scores_of(tmp_path, ["gpqa"], "bf16", seeds=[0, 2])["gpqa"]] == [0, 2]
    assert scores_of(tmp_path, ["gpqa"], "oscar") == {}
