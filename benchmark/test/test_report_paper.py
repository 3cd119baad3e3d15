"""The page of the paper's serving experiments: ratios of one run, the paper's rows, nothing that was not measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import report_paper
from paper_figures import TABLE8, TABLE9
from paper_loads import EXPERIMENTS, STEPS, Load
from paper_results import BF16, FP8, read

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
SPEED = {"bf16": 20.0, "fa3": 25.0, "fp8": 24.0, "fa3_fp8": 30.0, "int2": 60.0, "k3v2": 50.0, "k2v2": 55.0}


def step(load: Load, attention: float) -> dict[str, Any]:
    ms = {"store": 0.5, "attention": attention, "matrix products": 5.0, "other": 0.75, "idle": 0.25}
    return {"fits": True, "needed": 1, "room": 2, "room_requests": 256, "running": load.requests,
            "ms_per_step": attention + 6, "ms": ms | {"total": sum(ms.values())}, "steps": 24.0,
            "longest": [{"kernel": "x", "us_per_step": 1.0, "launches": 36.0}]}  # fmt: skip


def row(experiment: str, load: Load, mode: str) -> dict[str, Any]:
    """A row of ``bench_paper.py``, whose 16-bit caches have room for 32 requests of 8,704 tokens."""
    head = {"experiment": experiment, **vars(load)}
    if experiment != STEPS:
        speed = SPEED[mode]
        return head | {"U": speed, "G": speed * load.requests / 2, "first_token_ms": 12.3, "seconds": 4.5,
                       "running": min(load.requests, 40), "cached_share": 0.0}  # fmt: skip
    if load.requests > 32 and mode in BF16:
        return head | {"fits": False, "needed": 557_056, "room": 342_000, "room_requests": 100}
    return head | step(load, 240 / SPEED[mode])


def result(
    folder: Path, name: str, experiments: tuple[str, ...], modes: tuple[str, ...], **facts: object
) -> tuple[Path, dict[str, Any]]:
    """A file of a run, and its content."""
    rows = {m: [row(e, load, m) for e in experiments for load in EXPERIMENTS[e]] for m in modes}
    data = {"gpu": H100, "python": "3.12.3", "sglang": "0.5.23", "torch": "2.11.0", "triton": "3.6.0",
            "command": "python benchmark/serving/bench_paper.py all", "shape": "qwen3-8b", "weights": "random",
            "gpus": 1, **facts, "rows": rows}  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return path, data


def cells(page: str, *begin: str) -> list[str]:
    """The one row of the page's tables that begins with these cells."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    (only,) = [line for line in found if tuple(line[: len(begin)]) == begin]
    return only


def written(paths: list[Path], out: Path) -> str:
    report_paper.write_page(paths, out)
    return out.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _plots() -> None:
    pytest.importorskip("matplotlib")


def test_the_papers_figures_agree_with_each_other() -> None:
    for steps in TABLE8["qwen3-8b"].values():
        assert list(steps) == [load.requests for load in EXPERIMENTS[STEPS]]
        for step in filter(None, steps.values()):
            assert step.total == pytest.approx(sum(part or 0 for part in step[:-1]), abs=0.15)
    assert pytest.approx(1.374, abs=1e-3) == TABLE9["qwen3-8b"]["OSCAR"].G / TABLE9["qwen3-8b"]["BF16"].G


def test_ratios_are_to_the_faster_baseline(tmp_path: Path) -> None:
    path, _ = result(tmp_path, "run", (STEPS, "table9"), tuple(SPEED))
    found, load = read(path), EXPERIMENTS["table9"][0]
    assert found.ratio("int2", BF16, "table9", load, "U") == 60 / 25
    assert found.ratio("bf16", BF16, "table9", load, "G") == 20 / 25
    assert found.ratio("int2", FP8, "table9", load, "U") == 60 / 30
    # Attention takes 9.6 ms with FlashAttention-3, 8 with its FP8, and 4 with INT2; all else 6.5 together.
    text = written([path], tmp_path / "paper.md")
    ours = cells(text, "32", "INT2 (k2v2)")
    assert ours[2:] == ["5.00", "4.00", "0.50", "0.75", "0.25", "10.50", "10.00", "2.40", "1.53", "2.00", "1.38"]
    assert cells(text, "32", "the paper: OSCAR")[2:] == [
        "5.7", "8.5", "0.5", "0.8", "-", "15.5", "-", "2.00", "1.51", "-", "-",
    ]  # fmt: skip
    assert cells(text, "32", "8,192", "1,024", "cold", "INT2 (k2v2)")[5:] == [
        "60.0", "960.0", "2.40", "2.40", "2.00", "2.00", "12", "32", "0%",
    ]  # fmt: skip
    assert cells(text, "32", "8,192", "1,024", "cold", "the paper: OSCAR")[5:9] == ["52.5", "1,374.0", "1.47", "1.37"]
    assert cells(text, "32", "8,192", "1,024", "cold", "the paper: Saw-INT4")[7:9] == ["1.20", "1.18"]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    path, data = result(tmp_path, "run", (STEPS,), ("bf16", "int2"))
    data["rows"]["bf16"][-1] |= {"room": 2_000_000}
    path.write_text(json.dumps(data))
    text = written([path], tmp_path / "paper.md")
    assert cells(text, "128", "BF16, FlashInfer")[2] == "does not fit: 100 at once"
    refused = cells(text, "64", "BF16, FlashInfer")
    assert refused[2:] == ["does not fit: 557,056 tokens in 342,000", *"-" * 10]
    assert cells(text, "64", "INT2 (k2v2)")[9:] == ["-"] * 4
    assert cells(text, "128", "the paper: BF16")[2:] == ["does not fit", *"-" * 10]
    drawn = (tmp_path / "figures" / "paper-run-table8.svg").read_text(encoding="utf-8")
    assert drawn.count("does not fit") == 4


def test_nothing_is_made_up_for_a_mode_that_is_missing(tmp_path: Path) -> None:
    path, _ = result(tmp_path, "run", ("figure4", "figure6"), ("int2",), shape="qwen3-4b")
    text = written([path], tmp_path / "paper.md")
    assert "BF16, Flash" not in text
    assert "## Table" not in text
    assert "## Figure 5" not in text
    for line in text.splitlines():
        if "| INT2 (k2v2) |" in line:
            assert [cell.strip() for cell in line.split("|")[8:12]] == ["-"] * 4
    assert cells(text, "1", "60,000", "1,024", "hit", "the paper: OSCAR")[5:] == [
        "-", "-", "2.52", "-", "-", "-", "-", "-", "-",
    ]  # fmt: skip
    # No speed over BF16 without BF16: the left panel is not there.
    drawn = (tmp_path / "figures" / "paper-run-figure4.svg").read_text(encoding="utf-8")
    assert "over those of BF16" not in drawn
    assert "behind 100,000 tokens" in drawn
    assert not list(tmp_path.glob("figures/*figure5*"))


def test_prompts_that_were_pushed_out_are_no_hits(tmp_path: Path) -> None:
    path, data = result(tmp_path, "run", ("figure4", "figure6"), ("bf16", "int2"))
    for found in data["rows"]["int2"]:
        found["cached_share"] = 0.997 if found["cache"] == "hit" else 0.0
    path.write_text(json.dumps(data))
    text = written([path], tmp_path / "paper.md")
    figure6 = text.partition("## Figure 6")[2]
    assert cells(figure6, "8", "100,000", "1,024", "hit", "BF16, FlashInfer")[-1] == "0%"
    assert cells(figure6, "8", "100,000", "1,024", "hit", "INT2 (k2v2)")[-1] == "100%"
    found = read(path)
    hit, cold = (Load(8, 100_000, 1024, cache) for cache in ("hit", "cold"))
    assert found.lost("bf16", "figure6", hit)
    assert not found.lost("int2", "figure6", hit)
    assert not found.lost("bf16", "figure6", cold)
    for name in ("figure4", "figure6"):
        drawn = (tmp_path / "figures" / f"paper-run-{name}.svg").read_text(encoding="utf-8")
        assert "pushed out and computed again" in drawn
        assert "prefix hit" not in drawn


def test_the_default_is_that_of_its_time(tmp_path: Path) -> None:
    """What ``int2`` stood for is in the result; those that do not say so are of codes of two bits."""
    paths = [
        result(tmp_path, "old", ("table9",), ("int2",))[0],
        result(tmp_path, "new", ("table9",), ("int2", "k2v2"), default_bits="k3v2")[0],
    ]
    said = {"int2": {"int2": {"codes": "keys 4, values 2"}}}
    paths.append(result(tmp_path, "said", ("table9",), ("int2",), default_bits="k3v2", servers=said)[0])
    labels = [[read(path).label(mode) for mode in read(path).modes("table9")] for path in paths]
    assert labels == [["INT2 (k2v2)"], ["K2V2", "INT2 (k3v2)"], ["INT2 (keys 4, values 2)"]]


def test_two_cards_are_told_apart(tmp_path: Path) -> None:
    paths = [
        result(tmp_path, "h100", ("table9", "figure4", "figure5"), ("bf16", "int2"))[0],
        result(tmp_path, "h200", ("table9", "figure5"), ("int2",), gpu=H200, shape="qwen3-8b:9")[0],
    ]
    text = written(paths, tmp_path / "paper.md")
    assert "### Table 9, h100: qwen3-8b on NVIDIA H100 80GB HBM3" in text
    assert "### Table 9, h200: qwen3-8b:9 on NVIDIA H200" in text
    assert cells(text, "`h200`")[:4] == ["`h200`", H200, "qwen3-8b", "9 of 36"]
    assert f"Times and tokens per second of {H200} are not comparable" in text
    assert f"{H100} is the paper's kind" in text
    assert "ratios of\n  runs with some of them" in text
    # No ratio across runs, and of the paper only ratios beside fewer layers.
    part = text[text.index("### Table 9, h200") : text.index("## Figure 4")]
    assert cells(part, "32", "8,192", "1,024", "cold", "INT2 (k2v2)")[7:11] == ["-"] * 4
    assert cells(part, "32", "8,192", "1,024", "cold", "the paper: OSCAR")[5:9] == ["-", "-", "1.47", "1.37"]
    names = {path.name for path in tmp_path.glob("figures/*")}
    assert names == {f"paper-{name}.svg" for name in ("h100-figure4", "h100-figure5", "h200-figure5")}
    assert all(f"(figures/{name})" in text for name in names)


def test_the_papers_rows_are_for_its_loads_only(tmp_path: Path) -> None:
    path, data = result(tmp_path, "run", (STEPS, "table9"), ("bf16", "int2"), gpu=None, gpus=0)
    for rows in data["rows"].values():
        for one in rows:
            one["prompt"] //= 4
            one.pop("ms", None)
    path.write_text(json.dumps(data))
    text = written([path], tmp_path / "paper.md")
    assert "the paper: " not in text
    assert "`run` are not all the paper's" in text
    assert cells(text, "32", "BF16, PyTorch")[2:] == [*"-" * 6, "18.00", *"-" * 4]
    assert not (tmp_path / "figures").exists()


def test_what_no_run_differs_in_is_not_said(tmp_path: Path) -> None:
    whole = result(tmp_path, "a", ("table9",), ("int2",))[0]
    text = written([whole], tmp_path / "paper.md")
    assert "not comparable" not in text
    assert "**Layers.**" not in text
    part = result(tmp_path, "b", ("table9",), ("int2",), gpu=H200, shape="qwen3-8b:18", weights="those of the model")[0]
    text = written([part], tmp_path / "paper.md")
    assert "the paper's kind" not in text
    assert "**Weights**" not in text
    assert "18 of 36" in text


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    path, _ = result(tmp_path, "run", tuple(EXPERIMENTS), ("bf16", "fa3_fp8", "int2"))
    for folder in ("a", "b"):
        report_paper.main([path], tmp_path / folder / "paper.md")
    files = sorted(file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert str(tmp_path) not in (tmp_path / "a" / "paper.md").read_text(encoding="utf-8")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path, data = result(tmp_path, "run", ("table9",), ("int2",))
    other = tmp_path / "other.json"
    for broken, why in (
        ("[]", "no object"),
        ("{", "no JSON"),
        ('{"gpu": null}', "python, sglang, torch, triton, command, shape, rows is missing"),
        (json.dumps(data | {"rows": {"int1": []}}), "no mode int1"),
        (json.dumps(data | {"rows": {"int2": [{"experiment": "table1"}]}}), "no experiment table1"),
        (json.dumps(data | {"rows": {"int2": [{"experiment": "table9"}]}}), "has no requests, prompt, answer, cache"),
    ):
        other.write_text(broken)
        with pytest.raises(typer.BadParameter, match=why):
            report_paper.main([other], tmp_path / "paper.md")
    with pytest.raises(ValueError, match="several results are named run"):
        report_paper.write_page([path, path], tmp_path / "paper.md")
    assert not (tmp_path / "paper.md").exists()
