"""Plots of a report: the figures of the OSCAR paper, from a run of ``bench_paper.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paper_figures import FIGURE4_CONTEXT, TABLE8
from paper_loads import COLD, EXPERIMENTS, HIT, OFF, STEPS, Load
from paper_results import BF16, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plots import new_figure, save

STYLES: dict[str, dict[str, Any]] = {
    "bf16": {"color": "#34495e", "marker": "s"},
    "fa3": {"color": "#34495e", "marker": "s", "linestyle": "--"},
    "fp8": {"color": "#7f8c8d", "marker": "D"},
    "fa3_fp8": {"color": "#7f8c8d", "marker": "D", "linestyle": "--"},
    "xqa": {"color": "#34495e", "marker": "s", "linestyle": ":"},
    "xqa_fp8": {"color": "#7f8c8d", "marker": "D", "linestyle": ":"},
    "exact": {"color": "#27ae60", "marker": "P"},
    "k4v2": {"color": "#8e44ad", "marker": "^"},
    "k3v2": {"color": "#2471a3", "marker": "v"},
    "k2v2": {"color": "#e67e73", "marker": "<"},
    "int2": {"color": "#c0392b", "marker": "o"},
}
"""Lines by mode, as in the README's figures."""
PAPER = {"color": "#e08e0b", "marker": "*", "linestyle": ":", "label": "the paper: OSCAR"}
LOST = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": "black",
        "label": "pushed out and computed again"}  # fmt: skip
"""A ring around points of prompts that did not stay in the cache."""
PARTS = {"matrix products": "#34495e", "attention": "#c0392b", "store": "#f4b860", "other": "#8fb3d9",
         "idle": "#d5d8dc"}  # fmt: skip
CACHES = {OFF: "no prefix cache", COLD: "prefix cache, empty before", HIT: "prompts computed before"}


def draw(result: Result, experiment: str, folder: Path) -> Path | None:
    """Draw one experiment of a run.

    Args:
        result: the run.
        experiment: of :data:`EXPERIMENTS`; table 9 has no plot.
        folder: where to.

    Returns:
        the file; None where nothing was measured that could be drawn.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    figure = DRAWN[experiment](result) if experiment in DRAWN else None
    if figure is None:
        return None
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{result.facts['shape']} on {result.gpu.removeprefix('NVIDIA ')}", fontsize=11)
    path = folder / f"paper-{result.name}-{experiment}.svg"
    save(figure, path)
    return path


def steps(result: Result) -> Any:
    """Table 8: bars of milliseconds by kind, for every number of requests and cache; the paper's are hatched."""
    methods = TABLE8.get(result.model, {}) if result.whole else {}
    modes = result.modes(STEPS)
    loads = [load for load in result.loads(STEPS) if any(result.value(m, STEPS, load, "total") for m in modes)]
    if not loads:
        return None
    figure = new_figure()
    axis = figure.subplots()
    at, ticks, names = 0.0, [], []
    for load in loads:
        bars = [(mode, [result.value(mode, STEPS, load, part) for part in PARTS], "") for mode in modes]
        for method, by_requests in methods.items() if load in EXPERIMENTS[STEPS] else ():
            step = by_requests[load.requests]
            parts = [None] * len(PARTS) if step is None else [*step[:-1], None]
            bars.append((f"paper: {method}", parts, "///"))
        for name, parts, hatch in bars:
            bottom = 0.0
            for color, took in zip(PARTS.values(), parts, strict=True):
                axis.bar(at, took or 0.0, 0.8, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0.3)
                bottom += took or 0.0
            if not any(parts) and left_out(result, name, load):
                axis.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=6)
            ticks.append(at)
            names.append(name)
            at += 1
        middle = at - (len(bars) + 1) / 2
        axis.text(middle, 1, f"{load.requests}", transform=axis.get_xaxis_transform(), ha="center", va="bottom")
        at += 1
    for part, color in PARTS.items():
        axis.bar(0, 0, color=color, label=part)
    axis.set_xticks(ticks, names, rotation=90, fontsize=6)
    axis.set_title("One step of decoding, milliseconds, by requests at once", pad=16)
    return figure


def left_out(result: Result, name: str, load: Load) -> bool:
    """Whether a bar is missing because the load did not fit."""
    row = result.row(name, STEPS, load)
    return name.startswith("paper") or (row is not None and not row["fits"])


def lines(
    axis: Any, result: Result, experiment: str, loads: list[Load], x: Callable[[Load], float], y: Callable[..., Any]
) -> bool:
    """A line for every mode; whether there is anything.

    Args:
        axis: to draw on.
        result, experiment: what was measured.
        loads: points of a line.
        x: where a load is.
        y: the figure of a mode and a load; None where there is none.
    """
    drawn = False
    for mode in result.modes(experiment):
        points = {load: (x(load), value) for load in loads if (value := y(mode, load)) is not None}
        if points:
            line(axis, result, mode, experiment, points)
            drawn = True
    return drawn


def line(axis: Any, result: Result, mode: str, experiment: str, points: dict[Load, tuple[float, float]]) -> None:
    """The line of a mode, with rings around the points of prompts that its cache has lost."""
    axis.plot(*zip(*points.values(), strict=True), label=result.label(mode), **STYLES[mode])
    lost = [point for load, point in points.items() if result.lost(mode, experiment, load)]
    if lost:
        axis.plot(*zip(*lost, strict=True), **LOST)


def contexts_and_batches(result: Result) -> Any:
    """Figure 4: speed of one request over BF16's by context, and throughput by requests at the longest context."""
    loads = result.loads("figure4")
    single = [load for load in loads if load.requests == 1]
    longest = max(load.prompt for load in loads)
    batches = [load for load in loads if load.prompt == longest]

    def speedup(mode: str, load: Load) -> float | None:
        return result.ratio(mode, BF16, "figure4", load, "U")

    panels = []
    if any(speedup(mode, load) for mode in result.modes("figure4") for load in single):
        panels.append("contexts")
    if any(result.value(mode, "figure4", load, "G") for mode in result.modes("figure4") for load in batches):
        panels.append("batches")
    if not panels:
        return None
    figure = new_figure()
    for panel, axis in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if panel == "contexts":
            lines(axis, result, "figure4", single, lambda load: load.prompt / 1000, speedup)
            stated = FIGURE4_CONTEXT.get(result.model, {})
            known = [load.prompt for load in single if load in EXPERIMENTS["figure4"] and load.prompt in stated]
            if known:
                axis.plot([prompt / 1000 for prompt in known], [stated[prompt] for prompt in known], **PAPER)
            axis.set_title("One request, tokens per second over those of BF16")
            axis.set_xlabel("tokens of context, thousands")
        else:
            lines(axis, result, "figure4", batches, *throughput(result, "figure4"))
            counted(axis, batches)
            axis.set_title(f"Tokens per second of a GPU behind {longest:,} tokens")
        axis.set_ylim(bottom=0)
    return figure


def throughput(result: Result, experiment: str) -> tuple[Callable[[Load], float], Callable[..., Any]]:
    """Throughput by requests, for :func:`lines`."""
    return lambda load: load.requests, lambda mode, load: result.value(mode, experiment, load, "G")


def counted(axis: Any, loads: list[Load]) -> None:
    """An axis of requests, with those that were measured."""
    axis.set_xscale("log", base=2)
    axis.set_xticks([load.requests for load in loads], [str(load.requests) for load in loads])
    axis.set_xlabel("requests")


def stress(result: Result) -> Any:
    """Figure 5: throughput by requests."""
    figure = new_figure()
    axis = figure.subplots()
    if not lines(axis, result, "figure5", result.loads("figure5"), *throughput(result, "figure5")):
        return None
    counted(axis, result.loads("figure5"))
    axis.set_ylim(bottom=0)
    axis.set_title("Tokens per second of a GPU")
    return figure


def frontiers(result: Result) -> Any:
    """Figure 6: tokens per second of a GPU over those of a user, a panel for every prefix cache."""
    loads = result.loads("figure6")
    caches = [cache for cache in CACHES if any(load.cache == cache for load in loads)]
    if not caches:
        return None
    figure = new_figure()
    for cache, axis in zip(caches, figure.subplots(1, len(caches), squeeze=False)[0], strict=True):
        axis.set_title(CACHES[cache])
        axis.set_xlabel("U, tokens per second of a user")
        for mode in result.modes("figure6"):
            points = {}
            for load in (load for load in loads if load.cache == cache):
                user, gpu = (result.value(mode, "figure6", load, key) for key in "UG")
                if user is not None and gpu is not None:
                    points[load] = user, gpu
                    axis.annotate(load.requests, (user, gpu), (3, 3), textcoords="offset points", fontsize=6)
            if points:
                line(axis, result, mode, "figure6", points)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("G, tokens per second of a GPU")
    return figure


DRAWN: dict[str, Callable[[Result], Any]] = {
    STEPS: steps,
    "figure4": contexts_and_batches,
    "figure5": stress,
    "figure6": frontiers,
}
