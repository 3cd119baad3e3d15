"""The acceptance benchmark: what it refuses to measure, the settings of its servers, and its statistics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import bench_acceptance
from bench_acceptance import Answer, Prompt, cache_settings, check, show, summary

PATH, BITS = "SGLANG_OSCAR_K_ROTATION_PATH", "SGLANG_OSCAR_K_BITS"


def prompts(documents: int) -> list[Prompt]:
    """A continuation and a question of every document, of two lengths."""
    lengths = [600 + 900 * (number % 2) for number in range(documents)]
    return [
        Prompt(length, number, kind, [1, 2], [3] if kind == "question" else [])
        for number, length in enumerate(lengths)
        for kind in ("continuation", "question")
    ]


def test_a_stock_cache_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_acceptance, "has_gpu", lambda: False)
    with pytest.raises(typer.BadParameter, match="bf16 needs a GPU"):
        check(["bf16", "int2"], "hadamard", "hadamard")
    check(["exact", "int2", "k3v2"], "hadamard", "hadamard")
    monkeypatch.setattr(bench_acceptance, "has_gpu", lambda: True)
    check(["bf16", "int2"], "hadamard", "hadamard")


def test_a_file_is_for_one_number_of_bits() -> None:
    with pytest.raises(typer.BadParameter, match="no int1"):
        check(["exact", "int1"], "hadamard", "hadamard")
    with pytest.raises(typer.BadParameter, match="one number of bits"):
        check(["int2", "k3v2"], "k.safetensors", "hadamard")
    check(["exact", "int2"], "k.safetensors", "v.safetensors")
    check(["int2", "k3v2"], "{mode}_k.safetensors", "{mode}_v.safetensors")


def test_bits_are_told_to_recipes_only() -> None:
    assert cache_settings("k3v2", "hadamard", "hadamard")[BITS] == "3"
    env = cache_settings("k3v2", "r/{mode}/k", "r/{mode}/v")
    assert env[PATH] == "r/k3v2/k"
    assert BITS not in env
    assert cache_settings("exact", "r/{mode}/k", "r/{mode}/v")[BITS] == "16"
    assert cache_settings("bf16", "r/k", "r/v") == {}


def test_differences_are_taken_over_the_same_documents() -> None:
    """Documents differ much and caches little: only pairs tell the caches apart."""
    asked = prompts(12)
    right = [prompt.kind == "question" or None for prompt in asked]
    steps = [16 + 2 * prompt.document for prompt in asked]
    first = [Answer(64, count, good) for count, good in zip(steps, right, strict=True)]
    second = [Answer(64, count + 1, good) for count, good in zip(steps, right, strict=True)]
    found = summary(asked, second, first)
    assert {"all", "question", "continuation", "600", "1500", "right_answers", "questions"} == set(found)
    assert found["all"]["tokens_per_step"] == pytest.approx(64 * 24 / sum(step + 1 for step in steps), abs=1e-4)
    low, high = found["all"]["interval"]
    assert high - low > 0.3
    low, high = found["all"]["difference_interval"]
    assert low <= found["all"]["difference"] <= high < 0
    assert high - low < 0.1
    assert (found["right_answers"], found["questions"]) == (1.0, 12)
    assert "difference" not in summary(asked, first, None)["all"]


def test_what_a_server_says_is_no_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked = prompts(4)
    answers = [Answer(64, 16, True if prompt.kind == "question" else None) for prompt in asked]
    show({"exact": {"server": {"bits": 16.0}} | summary(asked, answers, None)})
    printed = capsys.readouterr().out
    assert "continuation" in printed
    assert "server" not in printed
