"""The README's figures are drawn from the committed results, and from a real model's where there are some."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import accuracy_figures  # noqa: E402
import plots  # noqa: E402
import served_figure  # noqa: E402


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of committed results without a real model's."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name in (
        plots.DECODE,
        plots.SERVING,
        plots.BOUND,
        plots.MEMORY,
        plots.DECODE_XQA,
        served_figure.RESULT,
        "h200_accuracy_reference.json",
        "accuracy_server_cpu.json",
    ):
        shutil.copy(plots.RESULTS / name, folder)
    return folder


def test_figures_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.main(["--out", str(tmp_path)])
    names = ("accuracy", "speed", "memory", "served")
    texts = {name: (tmp_path / f"{name}.svg").read_text(encoding="utf-8") for name in names}
    assert "recipe plus" in texts["accuracy"]
    assert "SGLang's fastest kernel" in texts["speed"]
    assert "recall of functions" in texts["served"]
    assert "4.61 million tokens" in texts["memory"]
    assert "0.75 million tokens" in texts["memory"]
    plots.main(["--out", str(tmp_path / "again")])
    assert {name: (tmp_path / "again" / f"{name}.svg").read_text(encoding="utf-8") for name in texts} == texts


def rows_of(results: Path) -> dict:
    run = json.loads((results / "h200_accuracy_reference.json").read_text())
    return run["models"]["reference"]["regimes"]


def add_real(results: Path, model: accuracy_figures.Model, rows: dict, kind: str = "accuracy") -> None:
    """Results of a real model with these rows."""
    regimes = {model.regime: {"rows": rows}}
    (results / f"{kind}_{model.name}.json").write_text(json.dumps({"models": {model.name: {"regimes": regimes}}}))


def test_points_are_those_of_the_results(results: Path) -> None:
    rows = rows_of(results)["keys x32"]["rows"]
    (shown,) = accuracy_figures.models_to_draw(results)
    assert (shown.name, shown.rows) == ("reference", rows)
    drawn = accuracy_figures.families(shown.model)
    family = next(family for family in drawn if "plus" in family.label)
    points = accuracy_figures.accuracy_points(rows, family, accuracy_figures.asked_length(rows, drawn))
    goals = ("2.75", "3.0", "3.25", "3.5", "4.0")
    assert [point.name for point in points] == ["plus g64", *(f"plus g64, --bits {goal}" for goal in goals)]
    kl = shown.rows["plus g64"]["language"]["kl"]
    assert points[0].kl == (kl["mean"], kl["low"], kl["high"])
    names = {name for family in drawn for name in family.names}
    assert {"naive INT2 g128", "QuaRot-INT2 g64", "OSCAR g64", "KIVI-2", "Kitty", "Saw-INT4"} <= names & set(rows)


def test_real_models_come_first_and_each_has_a_figure(results: Path, tmp_path: Path) -> None:
    """The larger one is the README's, with questions about the longest documents that all that is drawn answered."""
    pytest.importorskip("matplotlib")
    rows = rows_of(results)["as trained"]["rows"]
    large, small = accuracy_figures.MODELS[:2]
    kept = {name: rows[name] for name in ("BF16", "OSCAR g128", "plus g128", "FP8")}
    add_real(results, small, {**kept, small.focus[0]: rows["plus g128"]})
    assert [x.model for x in accuracy_figures.models_to_draw(results)] == [small]
    for row in kept.values():
        row["retrieval"]["16384"] = row["retrieval"]["1024"]
    add_real(results, large, {**kept, large.focus[0]: kept["plus g128"]})
    assert [x.model for x in accuracy_figures.models_to_draw(results)] == [large, small]
    plots.main(["--results", str(results), "--out", str(tmp_path)])
    texts = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("accuracy*.svg")}
    assert set(texts) == {"accuracy.svg", "accuracy_smollm2.svg"}
    for name, model, length in (("accuracy.svg", large, "16,384"), ("accuracy_smollm2.svg", small, "4,096")):
        assert model.name in texts[name]
        assert "recipe focus" in texts[name]
        assert f"about {length} tokens" in texts[name]
    assert not (tmp_path / "bits.svg").exists()


def test_chart_has_every_width_of_keys_and_of_values(results: Path, tmp_path: Path) -> None:
    """Sixteen numbers, each the mean over the kinds of text; exact keys and values lose nothing."""
    pytest.importorskip("matplotlib")
    known = rows_of(results)["as trained"]["rows"]
    model, rows, wanted = accuracy_figures.MODELS[0], {}, []
    for (keys, values), name in accuracy_figures.chart_names(model.focus[0]).items():
        loss = 0.0 if keys == values == 16 else 1 / (keys * values)
        row = json.loads(json.dumps(known["BF16"]))
        row["language"]["kl"]["mean"] = 2 * loss
        row["kinds"] = {"chat": {"kl": {"mean": 0.0}}}
        rows[name] = row
        wanted.append(f"{loss:.4f}" if loss else "0")
    add_real(results, model, rows, "widths")
    plots.main(["--results", str(results), "--out", str(tmp_path)])
    text = (tmp_path / "bits.svg").read_text(encoding="utf-8")
    assert all(f">{number}<" in text for number in wanted)
    assert model.name in text


def test_without_results_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results"):
        accuracy_figures.models_to_draw(tmp_path)
