"""What ``oscar prove`` refuses before it starts anything, and which rows options name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_tools.cli import app
from oscar_tools.evaluation.prove.options import CacheOptions
from support.prove_runs import ROTATIONS
from support.reference import MODEL, ROOT


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--measure", "luck"], "'luck' is not one of tail-kl, effects, retrieval, recall, tasks, session, json"),
        (["--cache", "int3"], "'int3' is not one of bf16, fp8, fp8-scaled, int2, naive"),
        (["--recipe", "x"], "'x' is not one of plus, focus, paper, hadamard, quarot"),
        (["--recipe", "plus", *ROTATIONS], "is for rotations that are fitted; some are given"),
        (["--bits", "3.0", *ROTATIONS], "is for rotations that are fitted; some are given"),
        (
            ["--bits", "k2v2", "--bits", "many"],
            "must be a mean such as 2.5, or widths of 2 or 3 or 4 or 16 such as k3v2",
        ),
        (["--bits", "3.0", "--recipe", "paper"], "has no meaning for --recipe paper"),
        (["--recipe", "quarot::3.0"], "has no meaning for --recipe quarot, which has two"),
        (
            ["--recipe", "plus:many"],
            "'plus:many' is not NAME, NAME:GROUP, NAME:GROUP:BITS, NAME::BITS or NAME:GROUP:BITS:CODINGS",
        ),
        (["--recipe", "plus:48"], "--recipe: group_size must be a power of two"),
        (["--recipe", "plus:128:2.3", "--recipe", "plus:128:2.0"], "must be from 2.25 to 16 with groups of 128, got 2"),
        (["--chunk-sizes", "many"], "'many' is not numbers with commas"),
        (["--chunk-sizes", "512", "--measure", "tail-kl"], "--chunk-sizes: has no meaning without --measure effects"),
        (["--servers", "0"], "should be greater than or equal to 1"),
        (["--bits", "k3v2", "--bits-by-model"], "--bits-by-model: has no meaning without a mean of --bits"),
        (["--bits-by-model"], "--bits-by-model: has no meaning without a mean of --bits"),
        (["--bits", "2.0", "--bits", "3.0"], "--bits: must be from 2.25 to 16 with groups of 128, got 2"),
        (["--group-size", "48"], "--group-size: group_size must be a power of two"),
        (["--cache", "bf16", "--bits", "3.0"], "--bits: has no meaning without --cache int2"),
        (["--cache", "naive", *ROTATIONS], "--k-rotation: has no meaning without --cache int2"),
        (["--measure", "tasks"], "tasks needs questions: name their file with --tasks"),
        (["--measure", "json", "--tasks", "x.jsonl"], "--tasks: has no meaning without --measure tasks"),
        (["--run-code"], "--run-code: has no meaning without --tasks"),
        (["--task-count", "5"], "--task-count: has no meaning without --tasks"),
        (
            ["--measure", "json", "--recall-lengths", "2048"],
            "--recall-lengths: has no meaning without --measure recall",
        ),
        (["--documents", "3", "--measure", "json"], "--documents: has no meaning without --measure tail-kl"),
        (["--functions", "3", "--measure", "json"], "--functions: has no meaning without --measure recall"),
        (["--seeds", "3", "--measure", "json"], "--seeds: has no meaning without --measure retrieval"),
        (["--seeds", "0"], "should be greater than or equal to 1"),
        (["--tp", "0"], "should be greater than or equal to 1"),
        (["--size", "huge"], "'huge' is not one of full, reduced"),
        (["--lengths", "many"], "'many' is not numbers with commas"),
        (["--lengths", "512"], "512 is below 1024"),
        (["--int2-args", "--x '"], "No closing quotation"),
        (["--rotations", "nowhere"], "nowhere: no such folder"),
        (["--rotations", str(ROOT / "docs")], "docs: holds no k_rotation"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], fault: str) -> None:
    done = CliRunner().invoke(app, ["prove", str(MODEL), "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2, done.output
    assert fault in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_servers_may_take_less_than_the_model(tmp_path: Path) -> None:
    for flags in ("--context-length 2048", "--context-length=2048"):
        done = CliRunner().invoke(
            app, ["prove", str(MODEL), "--out", str(tmp_path), "--lengths", "2048", "--server-args", flags]
        )
        assert "a context of 2048 tokens does not fit: the model takes 2048, less 64" in done.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    for model, arguments, fault in (
        (tmp_path / "nowhere", [], "nowhere"),
        (MODEL, ["--lengths", "8192"], "a context of 8192 tokens does not fit: the model takes 8192, less 64"),
        (MODEL, ["--recall-lengths", "8000"], "modules of 8000 tokens do not fit: the model takes 8192, less 640"),
        (MODEL, ["--tasks", str(tmp_path / "none.jsonl")], "none.jsonl: no such file"),
        (MODEL, ["--text", str(tmp_path / "none.txt")], "none.txt: no such file"),
    ):
        done = CliRunner().invoke(app, ["prove", str(model), "--out", str(tmp_path / "out"), *arguments])
        assert done.exit_code == 1, done.output
        assert fault in done.stderr
        assert done.stderr.count("\n") == 1


def test_every_recipe_for_all_bits() -> None:
    both = CacheOptions(recipe=["focus", "plus"], bits=["k3v2", "3.0", "3.0"]).specs()
    assert [fit.title for fit in both] == [
        f"recipe {recipe}{bits}" for recipe in ("focus", "plus") for bits in ("", ", --bits 3.0")
    ]
    assert [fit.title for fit in CacheOptions().specs()] == ["recipe focus"]
    assert [fit.title for fit in CacheOptions(recipe=["plus"], bits=["k2v2"]).specs()] == ["recipe plus, --bits k2v2"]
    asked = CacheOptions(bits=["k16v2", "3.0"], bits_by_model=True).specs()
    assert [(fit.title, fit.suffix) for fit in asked] == [
        ("recipe focus, --bits k16v2", "-k16v2"),
        ("recipe focus, --bits 3.0, by the model", "-3.0-by-model"),
    ]
