"""The figures of README and docs from committed results: accuracy, speed by context, and where memory goes.

    python benchmark/plots.py      # reads benchmark/results, writes docs/figures/*.svg

Needs matplotlib: ``pip install 'sglang-oscar[plots]'``. What is drawn of accuracy is in :mod:`accuracy_figures`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from accuracy_figures import draw_accuracy, draw_bits, measured_in, models_to_draw
from figures import new_figure, save
from served_figure import draw_served

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmark" / "results", ROOT / "docs" / "figures"

DECODE, BOUND = "h200_kernels_decode_stock.json", "h200_serving_decode_qwen3_8b.json"
DECODE_XQA = "h200_kernels_decode_xqa.json"
"""The same shapes on the same kind of card, with the third stock kernel."""
STOCK = {"BF16": ("baseline_us", "fa3_us", "xqa_us"), "FP8": ("flashinfer_fp8_us", "fa3_fp8_us", "xqa_fp8_us")}
"""Stock kernels by cache; the fastest is drawn."""
SERVING, CONTEXTS = "h200_paper_qwen3_8b.json", "figure4"
"""One request by context, every cache in one run; the experiment is the paper's."""
BATCH = 32
"""Requests of the attention panel."""
MEMORY, BF16_TOKEN_BYTES = "h200_memory_qwen3_8b.json", 2 * 36 * 8 * 128 * 2
"""Keys and values of a token of Qwen3-8B in 16 bits: 36 layers, 8 kv heads of 128."""


TWO_BITS = "two bits"
"""What the account of memory is of."""


def read(path: Path) -> Any:
    """A result file."""
    return json.loads(path.read_text(encoding="utf-8"))


def draw_speed(folder: Path, path: Path) -> None:
    """Attention of one layer and milliseconds per generated token over context, beside the limit of memory.

    Args:
        folder: of results.
        path: the figure.
    """
    decode, serving, bounds = read(folder / DECODE), read(folder / SERVING)["rows"], read(folder / BOUND)["rows"]
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    rows = [row for row in decode["rows"] if row["batch"] == BATCH]
    lengths = [row["length"] / 1000 for row in rows]
    third = {(row["batch"], row["length"]): row for row in read(folder / DECODE_XQA)["rows"]}
    for cache, kernels in STOCK.items():
        both = [(row, third[row["batch"], row["length"]]) for row in rows]
        fastest = [min(one[key] for one in pair for key in kernels if key in one) for pair in both]
        left.plot(lengths, fastest, **STYLES[cache])
    for key, style in (("cuda:k4v2_us", "K4V2"), ("cuda:k3v2_us", "K3V2"), ("cuda_us", "K2V2"), ("limit_us", "bound")):
        left.plot(lengths, [row[key] for row in rows], **STYLES[style])
    left.set_title(f"Attention of one layer, {BATCH} requests, microseconds")
    for cache, label in (("fa3", "BF16"), ("fa3_fp8", "FP8"), ("int2", "K2V2")):
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
    """The KV budget of a card in BF16, in FP8 and with two bits.

    Args:
        folder: of results.
        path: the figure.
    """
    results = read(folder / MEMORY)
    row = results["rows"][0]
    tokens = row["account_gib"] * 2**30 / BF16_TOKEN_BYTES
    figure = new_figure(height=2.6)
    axis = figure.subplots()
    parts = (
        (TWO_BITS, 0.0, row["pool_gib"], "#8fb3d9", f"history: {row['pool_tokens'] / 1e6:.2f} million tokens"),
        (TWO_BITS, row["pool_gib"], row["windows_gib"], "#f4b860", f"windows of\n{row['max_running']:.0f} requests"),
        (TWO_BITS, row["pool_gib"] + row["windows_gib"], row["extend_gib"], "#7f8c8d", ""),
        ("FP8", 0.0, row["account_gib"], "#7f8c8d", f"{2 * tokens / 1e6:.2f} million tokens"),
        ("BF16", 0.0, row["account_gib"], "#34495e", f"{tokens / 1e6:.2f} million tokens"),
    )
    for name, left, width, color, text in parts:
        axis.barh(name, width, left=left, color=color, height=0.6)
        ink = "black" if name == TWO_BITS else "white"
        axis.text(left + width / 2, name, text, ha="center", va="center", color=ink, fontsize=8)
    axis.set_xlim(0, row["account_gib"])
    axis.set_xlabel("GiB of the KV budget")
    axis.grid(False)
    figure.suptitle(f"Qwen3-8B on one {results['gpu'].removeprefix('NVIDIA ')}", fontsize=10)
    save(figure, path)


STYLES: dict[str, dict[str, Any]] = {
    "BF16": {"label": "BF16, SGLang's fastest kernel", "color": "#34495e", "marker": "s"},
    "FP8": {"label": "FP8, SGLang's fastest kernel", "color": "#7f8c8d", "marker": "D"},
    "K4V2": {"label": "keys in 4 bits, values in 2", "color": "#8e44ad", "marker": "^"},
    "K3V2": {"label": "keys in 3 bits, values in 2 (default)", "color": "#2471a3", "marker": "v"},
    "K2V2": {"label": "keys and values in 2 bits", "color": "#c0392b", "marker": "o"},
    "bound": {"label": "2 bits, their bytes at the card's read bandwidth", "color": "#c0392b", "linestyle": ":"},
}


def main(argv: list[str] | None = None) -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of figures")
    args = parser.parse_args(argv)
    drawn = [args.out / f"{name}.svg" for name in ("speed", "memory", "served")]
    for draw, path in zip((draw_speed, draw_memory, draw_served), drawn, strict=True):
        draw(args.results, path)
    for number, measured in enumerate(models_to_draw(args.results)):
        # The first is the README's; of the others each has a figure by its name.
        name = "accuracy" if number == 0 else f"accuracy_{measured.name.split('-')[0].lower()}"
        drawn.append(args.out / f"{name}.svg")
        draw_accuracy(measured, drawn[-1])
    for measured in [x for x in measured_in(args.results, "widths") if x.has_chart][:1]:
        drawn.append(args.out / "bits.svg")
        draw_bits(measured, drawn[-1])
    for path in drawn:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
