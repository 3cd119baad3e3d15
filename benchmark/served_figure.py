"""The figure of what a real model behind servers keeps of its answers, by cache, from a result of ``oscar prove``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from figures import new_figure, save

RESULT = "h200_prove_qwen2.5_coder_1.5b.json"
FAR = "8192"
"""Tokens in front of what KL and needles are read behind."""
ROWS = {
    "bf16": "BF16",
    "fp8": "FP8",
    "int2-focus-3.0": "focus 3.0",
    "int2-focus-k3v2": "focus k3v2\n(default)",
    "int2-focus-2.5": "focus 2.5",
    "int2-focus": "focus k2v2",
    "int2": "plus k2v2",
    "int2-paper-g64": "OSCAR,\npublished",
}
"""Caches that are drawn, by their names in the result, from the most bits to the fewest of each kind."""


class Measure(NamedTuple):
    """What is asked: its label and color, and where a cache's figures hold the share of right answers."""

    label: str
    color: str
    path: tuple[str, ...]


MEASURES = (
    Measure("GSM8K, buried", "#c0392b", ("tasks", "files", "gsm8k_test", "right")),
    Measure("HumanEval, buried", "#2471a3", ("tasks", "files", "humaneval", "right")),
    Measure("recall of functions, 6K", "#27ae60", ("recall", "all", "right")),
    Measure("needles, 8K", "#7f8c8d", ("retrieval", "tasks", "needle", "lengths", FAR, "right")),
)


def found(figures: Any, path: tuple[str, ...]) -> Any:
    """What lies at a path; None where the cache was not asked."""
    for name in path:
        figures = figures.get(name) if figures else None
    return figures


def draw_served(folder: Path, path: Path) -> None:
    """Right answers and KL by cache.

    Args:
        folder: of results.
        path: the figure.
    """
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    caches = {cache["name"]: cache for cache in result["caches"]}
    rows = [caches[name] for name in ROWS]
    labels = [f"{ROWS[row['name']]}\n{row['bits']:.3g} bits" for row in rows]
    figure = new_figure()
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, measure in enumerate(MEASURES):
        shown = [(place, rate) for place, row in enumerate(rows) if (rate := found(row["figures"], measure.path))]
        places = [place + (number - 1.5) * 0.16 for place, _ in shown]
        means = [rate["mean"] for _, rate in shown]
        # Wilson's bounds of a rate at its end are rounded to that end.
        below = [max(0.0, rate["mean"] - rate["low"]) for _, rate in shown]
        above = [max(0.0, rate["high"] - rate["mean"]) for _, rate in shown]
        left.bar(places, means, 0.16, yerr=(below, above), label=measure.label, color=measure.color,
                 error_kw={"elinewidth": 0.7, "capsize": 1.5})  # fmt: skip
    left.set_title("Share of right answers (higher is better)")
    left.set_ylim(0, 1.05)
    kl = [found(row["figures"], ("tail-kl", FAR, "kl", "mean", "mean")) for row in rows]
    right.barh(range(len(rows)), kl, 0.6, color="#8e44ad")
    right.set_xscale("log")
    right.invert_yaxis()
    right.set_yticks(range(len(rows)), [label.replace("\n", ", ") for label in labels], fontsize=7)
    right.set_title("KL to BF16 behind 8K tokens (lower is better)")
    left.set_xticks(range(len(rows)), labels, fontsize=6.5)
    left.grid(visible=False, axis="x")
    right.grid(visible=False, axis="y")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Qwen2.5-Coder-1.5B-Instruct, served; what is asked for lies in the cache", fontsize=11)
    save(figure, path)
