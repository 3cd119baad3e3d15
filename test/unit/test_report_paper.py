"""The page with the paper's serving figures beside ours: what it compares, what it leaves out, and its plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmark" / "serving"), str(ROOT / "benchmark")]

import bench_step  # noqa: E402
import paper  # noqa: E402
import report_paper  # noqa: E402
from report_paper import page, runs_of  # noqa: E402

HEAD = {"python": "3.12", "sglang": "0.5.23", "torch": "2.11", "triton": "3.6", "command": "python bench"}


def served(load: paper.Load, experiment: str, user: float, gpu: float) -> dict[str, Any]:
    """A row of bench_paper.py."""
    own = {"requests": load.requests, "prompt": load.prompt, "answer": load.answer, "cache": load.cache}
    return {"experiment": experiment} | own | {"U": user, "G": gpu, "running": load.requests, "cached_share": 0.0}


def paper_result(shape: str = "qwen3-8b", gpu: str = "NVIDIA H200") -> dict[str, Any]:
    """A result of all experiments; int2 is four times as fast as BF16 and twice as fast as FP8."""
    speeds = {"bf16": 10.0, "fa3": 11.0, "fa3_fp8": 20.0, "int2": 40.0}
    rows = {
        mode: [
            served(load, name, speed, speed * load.requests)
            for name, loads in paper.EXPERIMENTS.items()
            for load in loads
        ]
        for mode, speed in speeds.items()
    }
    return HEAD | {"gpu": gpu, "shape": shape, "rows": rows}


def step_result() -> dict[str, Any]:
    profile = {"us_per_step": {"attention": 790.0, "matrix products": 4150.0}, "idle_us_per_step": 100.0}
    fits = bench_step.row_of(8, 5.64, profile) | {"fits": True}
    rows = {"bf16": [fits, {"requests": 64, "fits": False}], "int2": [fits, fits | {"requests": 64}]}
    return HEAD | {"gpu": "NVIDIA H200", "shape": "qwen3-8b", "experiment": "table8", "rows": rows}


def cells(text: str, *starts: object) -> list[str]:
    """Cells of the first row of a table that begins with these."""
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
    return next(line for line in lines if line[: len(starts)] == [str(start) for start in starts])


def test_a_row_of_a_step() -> None:
    row = step_result()["rows"]["int2"][0]
    assert row == {"requests": 8, "ms": 5.64, "matrix products": 4.15, "attention": 0.79, "store": 0.0, "other": 0.0,
                   "idle": 0.1, "fits": True}  # fmt: skip


def test_ratios_are_to_the_best_rival() -> None:
    text = page(runs_of([paper_result()]), "figures", set())
    assert cells(text, "INT2") == ["INT2", "40.0", "1280.0", "3.64", "3.64", "2.00"]
    assert cells(text, "*paper: OSCAR*") == ["*paper: OSCAR*", "52.5", "1374.0", "1.47", "1.37", "-"]
    behind = cells(text, "100,000", 32, "hit", "INT2")
    assert behind[4:] == ["40.0", "1280.0", "32", "0.0", "3.64", "2.00"]
    assert "3.08" not in text  # the paper's, of another shape
    assert (
        cells(page(runs_of([paper_result("qwen3-4b")]), "", set()), "100,000", 1, "hit", "*paper: OSCAR*")[-2] == "3.08"
    )


def test_steps_and_what_does_not_fit() -> None:
    text = page(runs_of([step_result()]), "figures", set())
    assert cells(text, "INT2", 8) == ["INT2", "8", "4.15", "0.79", "0.0", "0.0", "0.1", "5.64"]
    assert cells(text, "BF16, FlashInfer", 64)[2:] == ["does not fit"] * 6
    assert cells(text, "*paper: OSCAR*", 128)[-1] == "39.3"
    assert "Table 9" not in text


def test_nothing_is_invented() -> None:
    result = paper_result("glm-4.7:8")
    del result["rows"]["bf16"], result["rows"]["fa3"], result["rows"]["fa3_fp8"]
    text = page(runs_of([result]), "figures", set())
    assert cells(text, "INT2") == ["INT2", "40.0", "1280.0", "-", "-", "-"]
    assert "*paper" not in text


def test_cards_side_by_side_but_never_mixed() -> None:
    both = runs_of([paper_result(), paper_result(gpu="NVIDIA H100 80GB HBM3"), step_result()])
    assert [(run.experiment, run.gpu) for run in both[:3]] == [
        ("table8", "H200"), ("table9", "H100 80GB HBM3"), ("table9", "H200"),
    ]  # fmt: skip
    text = page(both, "figures", set())
    assert text.count("`python bench`") == 2
    with pytest.raises(ValueError, match="two results have table9 of qwen3-8b on H200"):
        runs_of([paper_result(), paper_result()])


@pytest.mark.parametrize("result", [[], {"rows": []}, {"rows": {"int2": [{"experiment": "table7"}]}, "shape": "x"}])
def test_other_results_are_refused(result: Any) -> None:
    with pytest.raises(ValueError, match=r"not a result|no experiment table7"):
        runs_of([result])


def test_page_and_plots_are_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "paper.json", tmp_path / "step.json"]
    for path, result in zip(paths, (paper_result(), step_result()), strict=True):
        path.write_text(json.dumps(result))
    made = []
    for name in ("a", "b"):
        report_paper.main(paths, tmp_path / name / "paper.md")
        made.append({
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*") if path.is_file()
        })  # fmt: skip
    assert made[0] == made[1]
    text = made[0].pop(Path("paper.md")).decode()
    assert len(made[0]) == 4
    assert all(f"]({path})" in text for path in made[0])
    assert all("INT2" in drawn.decode() for drawn in made[0].values())


def test_the_paper_adds_up() -> None:
    """Kinds of a step are the whole of it, as far as its figures are rounded."""
    for steps in paper.TABLE8.values():
        for kinds in steps.values():
            assert sum(kinds.values()) - kinds["ms"] == pytest.approx(kinds["ms"], abs=0.21)


def test_a_machine_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "has_gpu", lambda: False)
    with pytest.raises(typer.BadParameter, match="no GPU"):
        bench_step.main()
