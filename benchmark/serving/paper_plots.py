"""Plots of the paper's serving experiments, as SVG in the style of the README's figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plots import new_figure, save

if TYPE_CHECKING:
    from report_paper import Run

STYLES: dict[str, dict[str, Any]] = {
    "bf16": {"label": "BF16, FlashInfer", "color": "#34495e", "marker": "s"},
    "fa3": {"label": "BF16, FlashAttention-3", "color": "#16a085", "marker": "P"},
    "fp8": {"label": "FP8, FlashInfer", "color": "#7f8c8d", "marker": "D"},
    "fa3_fp8": {"label": "FP8, FlashAttention-3", "color": "#e08e0b", "marker": "X"},
    "k4v2": {"label": "keys in 4 bits, values in 2", "color": "#8e44ad", "marker": "^"},
    "k3v2": {"label": "keys in 3 bits, values in 2", "color": "#2471a3", "marker": "v"},
    "int2": {"label": "INT2", "color": "#c0392b", "marker": "o"},
}
KIND_COLORS = {
    "matrix products": "#34495e",
    "attention": "#c0392b",
    "store": "#e08e0b",
    "other": "#7f8c8d",
    "idle": "#d5d8dc",
}
CACHES = {"off": "prefix cache off", "cold": "prefix cache empty", "hit": "every prompt cached"}


def style(mode: str) -> dict[str, Any]:
    """How a cache is drawn."""
    return STYLES.get(mode, {"label": mode, "color": "#6e4b2a", "marker": "*"})


def draw(run: Run, path: Path) -> bool:
    """Draw a run; false where its experiment has no plot.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    makers = {"table8": _steps, "figure4": _behind_prompts, "figure5": _requests, "figure6": _frontier}
    if run.experiment not in makers:
        return False
    figure = new_figure()
    makers[run.experiment](figure, run)
    figure.suptitle(f"{run.shape} on one {run.gpu}", fontsize=11)
    save(figure, path)
    return True


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _steps(figure: Any, run: Run) -> None:
    """Stacked bars: a group for every number of requests, a bar for every cache."""
    axis = figure.subplots()
    counts = list(dict.fromkeys(row["requests"] for rows in run.rows.values() for row in rows))
    width = 0.8 / len(run.rows)
    for number, rows in enumerate(run.rows.values()):
        for row in rows:
            at, bottom = counts.index(row["requests"]) + (number - (len(run.rows) - 1) / 2) * width, 0.0
            if not row["fits"]:
                axis.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
                continue
            for kind, color in KIND_COLORS.items():
                axis.bar(at, row[kind], width * 0.9, bottom=bottom, color=color)
                bottom += row[kind]
    for kind, color in KIND_COLORS.items():
        axis.bar(0, 0, color=color, label=kind)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.set_xlabel(f"requests at once; bars from left: {', '.join(style(mode)['label'] for mode in run.rows)}")
    axis.set_title("Milliseconds of a step of decoding")
    _legend(figure, axis)


def _behind_prompts(figure: Any, run: Run) -> None:
    """Left one request's speed over BF16 by prompt, right throughput by requests behind the longest prompt."""
    left, right = figure.subplots(1, 2)
    base = {row["prompt"]: run.best(("bf16", "fa3"), "U", requests=1, prompt=row["prompt"])
            for rows in run.rows.values() for row in rows}  # fmt: skip
    longest = max(base)
    for mode, rows in run.rows.items():
        points = [
            (r["prompt"] / 1000, r["U"] / base[r["prompt"]]) for r in rows if r["requests"] == 1 and base[r["prompt"]]
        ]
        left.plot(*zip(*points, strict=True), **style(mode)) if points else None
        loads = [(str(r["requests"]), r["G"]) for r in rows if r["prompt"] == longest]
        right.plot(*zip(*loads, strict=True), **style(mode)) if loads else None
    left.set_title("One request: speed over the best BF16")
    left.set_xlabel("cached tokens, thousands")
    right.set_title(f"Tokens per second behind {longest:,} cached tokens")
    right.set_xlabel("requests at once")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
    _legend(figure, right)


def _requests(figure: Any, run: Run) -> None:
    axis = figure.subplots()
    for mode, rows in run.rows.items():
        axis.plot([row["requests"] for row in rows], [row["G"] for row in rows], **style(mode))
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_title("Tokens per second of the GPU, prompts computed within")
    axis.set_xlabel("requests sent at once")
    _legend(figure, axis)


def _frontier(figure: Any, run: Run) -> None:
    """A panel for every state of the prefix cache: speed of a user against that of the GPU."""
    axes = figure.subplots(1, 3)
    for axis, (cache, title) in zip(axes, CACHES.items(), strict=True):
        for mode, rows in run.rows.items():
            points = [(row["U"], row["G"]) for row in rows if row["cache"] == cache]
            axis.plot(*zip(*points, strict=True), **style(mode)) if points else None
        axis.set_title(title)
        axis.set_xlabel("tokens per second of a user")
    axes[0].set_ylabel("tokens per second of the GPU")
    _legend(figure, axes[-1])
