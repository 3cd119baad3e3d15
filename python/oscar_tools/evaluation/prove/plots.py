"""Plots of a run. matplotlib is imported here only; it comes with the extra ``plots``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oscar_rotation.errors import ReportError
from oscar_tools.evaluation.prove.measures.tail_kl import ALL

Row = dict[str, Any]
FOLDER = "plots"


def draw(results: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw what there is to draw.

    Args:
        results: as for :func:`page.page`.
        folder: of the page.

    Returns:
        measure -> file, relative to the folder.

    Raises:
        ReportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError("no plots: they need matplotlib, pip install 'sglang-oscar[plots]'") from None
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    written = {}
    for name, fill in PLOTS.items():
        rows = [row for row in results["caches"] if row["figures"].get(name)]
        if rows:
            figure = Figure(layout="constrained")
            fill(figure, rows)
            written[name] = f"{FOLDER}/{name}.png"
            figure.savefig(folder / written[name], dpi=120)
    return written


def _tail(figure: Any, rows: Sequence[Row]) -> None:
    """KL by context, one line per statistic and cache."""
    figure.set_size_inches(10, 3.4)
    for axes, (name, title) in zip(
        figure.subplots(1, 3), {"mean": "mean", "p99": "99th percentile", "p99.9": "99.9th percentile"}.items(),
        strict=True,
    ):  # fmt: skip
        for row in rows:
            by_length = {int(key): x["kl"][name] for key, x in row["figures"]["tail-kl"].items() if key != ALL}
            found = list(by_length.values())
            middle = np.array([x["mean"] for x in found])
            # An interval of skewed tokens may not reach up to the figure itself.
            errors = np.abs([middle - [x["low"] for x in found], [x["high"] for x in found] - middle])
            axes.errorbar(list(by_length), middle, errors, marker="o", capsize=3, label=row["title"])
        axes.set(title=f"KL per token, {title}", xlabel="context, tokens", yscale="log")
    figure.axes[0].set_ylabel("nats")
    figure.axes[0].legend(fontsize="small")


def _retrieval(figure: Any, rows: Sequence[Row]) -> None:
    """Heat maps: task x cache, context by depth."""
    tasks = list(rows[0]["figures"]["retrieval"]["tasks"])
    figure.set_size_inches(1.5 + 2.6 * len(rows), 0.6 + 2.2 * len(tasks))
    axes = figure.subplots(len(tasks), len(rows), squeeze=False)
    image = None
    for i, task in enumerate(tasks):
        for j, row in enumerate(rows):
            cells = row["figures"]["retrieval"]["tasks"].get(task, {}).get("map", {})
            lengths, depths = list(cells), list(next(iter(cells.values()), {}))
            shown = np.array([[cells[n].get(d, np.nan) for n in lengths] for d in depths])
            if not shown.size:
                continue
            image = axes[i][j].imshow(shown, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes[i][j].set(title=f"{row['title']}\n{task}" if i == 0 else task)
            axes[i][j].set_xticks(range(len(lengths)), lengths)
            axes[i][j].set_yticks(range(len(depths)), [f"{d}%" for d in depths])
    if image is not None:
        figure.colorbar(image, ax=axes, label="exact match")
    figure.supxlabel("context, tokens")
    figure.supylabel("depth of the fact")


BIN = 10
"""Turns that a point of the session's recall stands for."""


def _session(figure: Any, rows: Sequence[Row]) -> None:
    """Recall over turns, and how many tokens of each prompt came from the cache."""
    figure.set_size_inches(10, 3.4)
    recall, cached = figure.subplots(1, 2)
    for row in rows:
        turns = row["figures"]["session"]["by_turn"]
        bins = [[t["right"] for t in turns[i : i + BIN] if t["right"] is not None] for i in range(0, len(turns), BIN)]
        points = [(i * BIN + BIN / 2, float(np.mean(x))) for i, x in enumerate(bins) if x]
        recall.plot(*zip(*points, strict=True), marker="o", label=row["title"]) if points else None
        cached.plot([t["turn"] for t in turns], [t["cached"] for t in turns], label=row["title"])
    if rows:
        turns = rows[0]["figures"]["session"]["by_turn"]
        cached.plot([t["turn"] for t in turns], [t["prompt"] for t in turns], "k:", label="prompt")
    recall.set(title=f"numbers recalled, {BIN} turns each", xlabel="turn", ylim=(-0.03, 1.03))
    cached.set(title="tokens from the prefix cache", xlabel="turn")
    cached.legend(fontsize="small")


PLOTS: dict[str, Callable[[Any, Sequence[Row]], None]] = {
    "tail-kl": _tail,
    "retrieval": _retrieval,
    "session": _session,
}
