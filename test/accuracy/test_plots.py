"""The README's figures are drawn from the committed results, and from a real model's where there are some."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import plots  # noqa: E402


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of committed results without a real model's."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name in (plots.DECODE, plots.SERVING, "h200_accuracy_reference.json", "accuracy_server_cpu.json"):
        shutil.copy(plots.RESULTS / name, folder)
    return folder


def test_figures_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.main(["--out", str(tmp_path)])
    texts = {name: (tmp_path / f"{name}.svg").read_text(encoding="utf-8") for name in ("accuracy", "speed", "memory")}
    assert "INT2, recipe plus" in texts["accuracy"]
    assert "stock SGLang" in texts["speed"]
    assert "4.61 million tokens" in texts["memory"]
    assert "0.75 million tokens" in texts["memory"]
    plots.main(["--out", str(tmp_path / "again")])
    assert {name: (tmp_path / "again" / f"{name}.svg").read_text(encoding="utf-8") for name in texts} == texts


def test_points_are_those_of_the_results(results: Path) -> None:
    rows = json.loads((results / "h200_accuracy_reference.json").read_text())["models"]["reference"]["regimes"]
    model, regime, shown = plots.accuracy_results(results)
    assert (model, regime, shown) == (*plots.SHIPPED_MODEL, rows["keys x32"]["rows"])
    family = next(family for family in plots.FAMILIES if "plus" in family.label)
    points = plots.accuracy_points(shown, family)
    goals = ("2.75", "3.0", "3.25", "3.5", "4.0")
    assert [point.name for point in points] == ["plus g64", *(f"plus g64, --bits {goal}" for goal in goals)]
    kl = shown["plus g64"]["language"]["kl"]
    assert points[0].kl == (kl["mean"], kl["low"], kl["high"])
    drawn = {name for family in plots.FAMILIES for name in family.names}
    assert {"naive INT2 g128", "QuaRot-INT2 g64", "OSCAR g64", "KIVI-2", "Kitty", "Saw-INT4"} <= drawn & set(shown)


def test_a_real_model_comes_first(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = json.loads((results / "h200_accuracy_reference.json").read_text())
    name, regime = plots.REAL_MODEL
    measured = run["models"].pop("reference")
    rows = measured["regimes"]["as trained"]["rows"]
    rows[plots.FAMILIES[0].names[0]] = rows.pop("OSCAR g128")
    run["models"][name] = {**measured, "regimes": {regime: {"rows": rows}}}
    (results / "accuracy_real.json").write_text(json.dumps(run))
    assert plots.accuracy_results(results) == (name, regime, rows)
    plots.draw_accuracy(results, tmp_path / "accuracy.svg")
    text = (tmp_path / "accuracy.svg").read_text(encoding="utf-8")
    assert name in text
    assert "recipe focus" in text


def test_without_results_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results"):
        plots.accuracy_results(tmp_path)
