"""The README's figures from committed results: accuracy by bits, speed by context, and where memory goes.

    python benchmark/plots.py      # reads benchmark/results, writes docs/figures/{accuracy,speed,memory}.svg

Needs matplotlib: ``pip install 'sglang-oscar[plots]'``. Accuracy comes from a real language model where its results are
among those that are read (:data:`REAL_MODEL`), else from the shipped model with key outliers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmark" / "results", ROOT / "docs" / "figures"

REAL_MODEL, SHIPPED_MODEL = ("SmolLM2-135M-Instruct", "as trained"), ("reference", "keys x32")
"""Model and regime of results of ``accuracy/run.py``."""
BITS_AT = "131072"
"""Tokens of context at which mean bits are counted."""
DECODE, BOUND = "h200_kernels_decode_stock.json", "h200_serving_decode_qwen3_8b.json"
SERVING, CONTEXTS = "h200_paper_qwen3_8b.json", "figure4"
"""One request by context, every cache in one run; the experiment is the paper's."""
BATCH = 32
"""Requests of the attention panel."""
MEMORY, BF16_TOKEN_BYTES = "h200_memory_qwen3_8b.json", 2 * 36 * 8 * 128 * 2
"""Keys and values of a token of Qwen3-8B in 16 bits: 36 layers, 8 kv heads of 128."""


@dataclass(frozen=True)
class Family:
    """Formats that are one line of the accuracy figure, by their names in the results, and how it is drawn."""

    label: str
    names: tuple[str, ...]
    color: str
    marker: str


FAMILIES = (
    Family("INT2, recipe focus", ("focus g64, served form, calibrated on all kinds, 41K tokens",), "#7b3294", "*"),
    Family(
        "INT2, recipe plus; --bits 2.75 to 4",
        ("plus g64", *(f"plus g64, --bits {bits}" for bits in ("2.75", "3.0", "3.25", "3.5", "4.0"))),
        "#c0392b",
        "o",
    ),
    Family("INT2, OSCAR as published", ("OSCAR g128", "OSCAR g64", "OSCAR g32"), "#e08e0b", "s"),
    Family("QuaRot INT2", ("QuaRot-INT2 g128", "QuaRot-INT2 g64"), "#2471a3", "D"),
    Family(
        "naive INT2, 3, 4",
        ("naive INT2 g128", "naive INT2 g64", "naive INT3 g128", "naive INT3 g64", "naive INT4 g128", "naive INT4 g64"),
        "#7f8c8d",
        "v",
    ),
    Family("KIVI-2", ("KIVI-2",), "#8e44ad", "P"),
    Family("Kitty", ("Kitty",), "#16a085", "X"),
    Family("OScaR", ("OScaR g32",), "#6e4b2a", "^"),
    Family("TurboQuant", ("TurboQuant K3V3", "TurboQuant K4V4"), "#27ae60", "<"),
    Family("Saw-INT4", ("Saw-INT4",), "#34495e", ">"),
    Family("KVarN", ("KVarN K2V2", "KVarN K4V2"), "#d98880", "h"),
    Family("Block-GTQ, with windows", ("Block-GTQ K2V2, windows",), "#5dade2", "p"),
    Family("NVFP4", ("NVFP4",), "#a04000", "d"),
    Family("FP8", ("FP8",), "#000000", "H"),
)


@dataclass(frozen=True)
class Point:
    """One format: mean bits per element, questions answered and KL to BF16 (nats a token), with 95% intervals."""

    name: str
    bits: float
    retrieval: tuple[float, float, float]
    kl: tuple[float, float, float]


def accuracy_results(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Model, regime and rows to draw: the real model's where ``folder`` has them, else the shipped model's.

    Raises:
        SystemExit: neither is there.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*accuracy*.json")):
        for model, data in json.loads(path.read_text(encoding="utf-8")).get("models", {}).items():
            for regime, measured in data["regimes"].items():
                found.setdefault((model, regime), {}).update(measured["rows"])
    for wanted in (REAL_MODEL, SHIPPED_MODEL):
        if wanted in found:
            return (*wanted, found[wanted])
    raise SystemExit(f"no results of accuracy/run.py for {REAL_MODEL[0]} or {SHIPPED_MODEL[0]} in {folder}")


def accuracy_points(rows: dict[str, Any], family: Family) -> list[Point]:
    """The points of a family that were measured, by bits."""
    points = []
    for name in (name for name in family.names if name in rows):
        shortest = next(iter(rows[name]["retrieval"].values()))["accuracy"]
        kl = rows[name]["language"]["kl"]
        points.append(
            Point(
                name,
                rows[name]["bits"][BITS_AT],
                (shortest["mean"], shortest["low"], shortest["high"]),
                (kl["mean"], kl["low"], kl["high"]),
            )
        )
    return sorted(points, key=lambda point: point.bits)


def draw_accuracy(folder: Path, path: Path) -> None:
    """Questions answered and KL to BF16 over bits per element.

    Args:
        folder: of results.
        path: the figure.
    """
    model, regime, rows = accuracy_results(folder)
    tokens = next(iter(rows["BF16"]["retrieval"]))
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for family in FAMILIES:
        points = accuracy_points(rows, family)
        for axis, measure in ((left, "retrieval"), (right, "kl")):
            values = [getattr(point, measure) for point in points]
            if not values:
                continue
            below = [max(0.0, mean - low) for mean, low, _ in values]
            above = [max(0.0, high - mean) for mean, _, high in values]
            axis.errorbar(
                [point.bits for point in points],
                [mean for mean, _, _ in values],
                yerr=[below, above],
                label=family.label,
                color=family.color,
                marker=family.marker,
                markersize=6,
                linewidth=1,
                elinewidth=0.8,
                capsize=2,
            )
    exact = rows["BF16"]["retrieval"][tokens]["accuracy"]["mean"]
    left.axhline(exact, color="black", linewidth=1, linestyle="--", label="BF16")
    left.set_title(f"Questions answered about {int(tokens):,} tokens (higher is better)")
    left.set_ylim(-0.03, 1.03)
    right.set_title("KL to BF16, nats per token (lower is better)")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xlabel("mean bits per element at 128K tokens (BF16: 16)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    shown = model if regime == "as trained" else f"the shipped model, {regime}"
    figure.suptitle(f"Accuracy by bits: {shown}", fontsize=11)
    save(figure, path)


def draw_speed(folder: Path, path: Path) -> None:
    """Attention of one layer and milliseconds per generated token over context, beside the limit of memory.

    Args:
        folder: of results.
        path: the figure.
    """
    decode = json.loads((folder / DECODE).read_text(encoding="utf-8"))
    serving = json.loads((folder / SERVING).read_text(encoding="utf-8"))["rows"]
    bounds = json.loads((folder / BOUND).read_text(encoding="utf-8"))["rows"]
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    rows = [row for row in decode["rows"] if row["batch"] == BATCH]
    lengths = [row["length"] / 1000 for row in rows]
    lines = ("baseline_us", "BF16"), ("fa3_fp8_us", "FP8"), ("cuda:k4v2_us", "K4V2"), ("cuda:k3v2_us", "K3V2")
    for key, style in (*lines, ("cuda_us", "INT2"), ("limit_us", "bound")):
        left.plot(lengths, [row[key] for row in rows], **STYLES[style])
    left.set_title(f"Attention of one layer, {BATCH} requests, microseconds")
    for cache, label in (("fa3", "BF16"), ("fa3_fp8", "FP8"), ("int2", "INT2")):
        rows = [row for row in serving[cache] if row["experiment"] == CONTEXTS and row["requests"] == 1]
        right.plot([row["prompt"] / 1000 for row in rows], [1000 / row["U"] for row in rows], **STYLES[label])
    lengths = [row["length"] / 1000 for row in bounds]
    right.plot(lengths, [row["int2_ms"] / row["int2_of_bound"] for row in bounds], **STYLES["bound"])
    right.set_title("One request, all of the model, milliseconds per token")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel("tokens of context, thousands")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    gpu = decode["gpu"].removeprefix("NVIDIA ")
    figure.suptitle(f"Speed by context: Qwen3-8B on one {gpu} (lower is better)", fontsize=11)
    save(figure, path)


def draw_memory(folder: Path, path: Path) -> None:
    """The KV budget of a card in BF16, in FP8 and in INT2.

    Args:
        folder: of results.
        path: the figure.
    """
    results = json.loads((folder / MEMORY).read_text(encoding="utf-8"))
    row = results["rows"][0]
    tokens = row["account_gib"] * 2**30 / BF16_TOKEN_BYTES
    figure = new_figure(height=2.6)
    axis = figure.subplots()
    parts = (
        ("INT2", 0.0, row["pool_gib"], "#8fb3d9", f"history: {row['pool_tokens'] / 1e6:.2f} million tokens"),
        ("INT2", row["pool_gib"], row["windows_gib"], "#f4b860", f"windows of\n{row['max_running']:.0f} requests"),
        ("INT2", row["pool_gib"] + row["windows_gib"], row["extend_gib"], "#7f8c8d", ""),
        ("FP8", 0.0, row["account_gib"], "#7f8c8d", f"{2 * tokens / 1e6:.2f} million tokens"),
        ("BF16", 0.0, row["account_gib"], "#34495e", f"{tokens / 1e6:.2f} million tokens"),
    )
    for name, left, width, color, text in parts:
        axis.barh(name, width, left=left, color=color, height=0.6)
        ink = "black" if name == "INT2" else "white"
        axis.text(left + width / 2, name, text, ha="center", va="center", color=ink, fontsize=8)
    axis.set_xlim(0, row["account_gib"])
    axis.set_xlabel("GiB of the KV budget")
    axis.grid(False)
    figure.suptitle(f"Qwen3-8B on one {results['gpu'].removeprefix('NVIDIA ')}", fontsize=10)
    save(figure, path)


STYLES: dict[str, dict[str, Any]] = {
    "BF16": {"label": "BF16, stock SGLang", "color": "#34495e", "marker": "s"},
    "FP8": {"label": "FP8, stock SGLang (FlashAttention-3)", "color": "#7f8c8d", "marker": "D"},
    "K4V2": {"label": "keys in 4 bits, values in 2", "color": "#8e44ad", "marker": "^"},
    "K3V2": {"label": "keys in 3 bits, values in 2", "color": "#2471a3", "marker": "v"},
    "INT2": {"label": "INT2", "color": "#c0392b", "marker": "o"},
    "bound": {"label": "INT2, its bytes at the card's read bandwidth", "color": "#c0392b", "linestyle": ":"},
}


def new_figure(height: float = 4.0) -> Any:
    """An empty figure of the README's width and ``height`` in inches.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'sglang-oscar[plots]'") from None
    # Text stays text and ids do not change from run to run: small files that can be compared.
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglang-oscar", "font.size": 9, "axes.titlesize": 9})
    rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False})
    return Figure(figsize=(9.5, height), layout="constrained", facecolor="white")


def save(figure: Any, path: Path) -> None:
    """Write a figure without the date of its making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(argv: list[str] | None = None) -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of figures")
    args = parser.parse_args(argv)
    for name, draw in (("accuracy", draw_accuracy), ("speed", draw_speed), ("memory", draw_memory)):
        draw(args.results, args.out / f"{name}.svg")
        print(f"wrote {args.out / name}.svg")


if __name__ == "__main__":
    main()
