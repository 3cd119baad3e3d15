"""Accuracy by bits, from results of ``accuracy/run.py``: formats beside each other, and widths of keys and of values.

Figures are of the first model of :data:`MODELS` that has results, and of each further real one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import new_figure, save

Rows = dict[str, Any]

BITS_AT = "131072"
"""Tokens of context at which mean bits are counted."""
WIDTHS = (2, 3, 4, 16)
"""Bits of keys and of values in the chart; 16 are exact."""


@dataclass(frozen=True)
class Model:
    """A model whose results are drawn.

    Attributes:
        name, regime: in the results.
        plus, focus: rows of the recipes, by bits.
    """

    name: str
    regime: str
    plus: tuple[str, ...]
    focus: tuple[str, ...]


def with_bits(recipe: str, *goals: str) -> tuple[str, ...]:
    """Rows of a recipe: as it is, and with each of ``--bits``."""
    return (recipe, *(f"{recipe}, --bits {goal}" for goal in goals))


NARROW = with_bits("plus g64", "2.75", "3.0", "3.25", "3.5", "4.0")
BROAD_FOCUS = ("focus g64, served form, calibrated on all kinds, 41K tokens",)
MODELS = (
    Model(
        "Qwen2.5-Coder-1.5B-Instruct",
        "as trained",
        with_bits("plus g128", "2.5", "3.0"),
        with_bits("focus g128, served form", "2.5", "2.75", "3.0", "3.5"),
    ),
    Model("SmolLM2-135M-Instruct", "as trained", NARROW, BROAD_FOCUS),
    Model("reference", "keys x32", NARROW, BROAD_FOCUS),
)
"""In the order of preference: real models, then the shipped one."""


@dataclass(frozen=True)
class Measured:
    """Rows of a model that are there, by name."""

    model: Model
    rows: Rows

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    @property
    def has_chart(self) -> bool:
        """Whether every width of keys was measured with every width of values."""
        return all(name in self.rows for name in chart_names(self.model.focus[0]).values())


@dataclass(frozen=True)
class Family:
    """Formats that are one line of the figure, by their names in the results, and how it is drawn."""

    label: str
    names: tuple[str, ...]
    color: str
    marker: str


def families(model: Model) -> tuple[Family, ...]:
    """What is drawn of a model."""
    return (
        Family("recipe focus", model.focus, "#7b3294", "*"),
        Family("recipe plus", model.plus, "#c0392b", "o"),
        Family("fitted fours (not served)", (f"{model.focus[0]}, keys as fitted fours",), "#c51b7d", "x"),
        Family("NOVA-KV", ("NOVA-KV",), "#1b7837", "1"),
        Family("OSCAR as published", ("OSCAR g128", "OSCAR g64", "OSCAR g32"), "#e08e0b", "s"),
        Family("QuaRot INT2", ("QuaRot-INT2 g128", "QuaRot-INT2 g64"), "#2471a3", "D"),
        Family(
            "naive INT2, 3, 4",
            tuple(f"naive INT{bits} g{group}" for bits in (2, 3, 4) for group in (128, 64)),
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
        Family("FP8, scaled", ("FP8, calibrated scale",), "#7f7f7f", "H"),
    )


@dataclass(frozen=True)
class Point:
    """One format: mean bits per element, questions answered and KL to BF16 (nats a token), with 95% intervals."""

    name: str
    bits: float
    retrieval: tuple[float, float, float]
    kl: tuple[float, float, float]


def measured_in(folder: Path, kind: str) -> list[Measured]:
    """Those of :data:`MODELS` that results of a kind have, "accuracy" or "widths", by their files' names."""
    found: dict[tuple[str, str], Rows] = {}
    for path in sorted(folder.glob(f"*{kind}*.json")):
        for name, data in json.loads(path.read_text(encoding="utf-8")).get("models", {}).items():
            for regime, measured in data["regimes"].items():
                found.setdefault((name, regime), {}).update(measured["rows"])
    return [Measured(x, found[x.name, x.regime]) for x in MODELS if (x.name, x.regime) in found]


def models_to_draw(folder: Path) -> list[Measured]:
    """The first model of :data:`MODELS` that ``folder`` has results of, and every further real one.

    Raises:
        SystemExit: there is none.
    """
    known = measured_in(folder, "accuracy")
    if not known:
        raise SystemExit(f"no results of accuracy/run.py for {' or '.join(x.name for x in MODELS)} in {folder}")
    return known[:1] + [x for x in known[1:] if x.model.regime == "as trained"]


def asked_length(rows: Rows, drawn: Sequence[Family]) -> str:
    """Tokens of the longest documents that every format which is drawn was asked about."""
    lengths = [set(rows[name]["retrieval"]) for family in drawn for name in family.names if name in rows]
    return max(set.intersection(set(rows["BF16"]["retrieval"]), *lengths), key=int)


def accuracy_points(rows: Rows, family: Family, length: str) -> list[Point]:
    """The points of a family that were measured, by bits; questions are those about ``length`` tokens."""
    points = []
    for name in (name for name in family.names if name in rows):
        asked, kl = rows[name]["retrieval"][length]["accuracy"], rows[name]["language"]["kl"]
        retrieval = (asked["mean"], asked["low"], asked["high"])
        points.append(Point(name, rows[name]["bits"][BITS_AT], retrieval, (kl["mean"], kl["low"], kl["high"])))
    return sorted(points, key=lambda point: point.bits)


def draw_accuracy(measured: Measured, path: Path) -> None:
    """Questions answered and KL to BF16 over bits per element.

    Args:
        measured: the model.
        path: the figure.
    """
    rows, drawn = measured.rows, families(measured.model)
    tokens = asked_length(rows, drawn)
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for family in drawn:
        points = accuracy_points(rows, family, tokens)
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
    regime = measured.model.regime
    shown = measured.name if regime == "as trained" else f"the shipped model, {regime}"
    figure.suptitle(f"Accuracy by bits: {shown}", fontsize=11)
    save(figure, path)


def chart_names(recipe: str) -> dict[tuple[int, int], str]:
    """Bits of keys and of values -> the row of a recipe."""
    names = {(keys, values): f"{recipe}, --bits k{keys}v{values}" for keys in WIDTHS for values in WIDTHS}
    return names | {(WIDTHS[0], WIDTHS[0]): recipe, (WIDTHS[-1], WIDTHS[-1]): "BF16"}


def mean_kl(row: Rows) -> float:
    """KL to BF16 in nats per token, mean over all kinds of text."""
    kinds = [row["language"], *row.get("kinds", {}).values()]
    return float(sum(kind["kl"]["mean"] for kind in kinds) / len(kinds))


def draw_bits(measured: Measured, path: Path) -> None:
    """KL to BF16 for every width of keys with every width of values, recipe ``focus``: a heat map with its numbers.

    Args:
        measured: a model with :attr:`Measured.has_chart`.
        path: the figure.
    """
    from matplotlib.colors import LogNorm

    rows, names = measured.rows, chart_names(measured.model.focus[0])
    losses = [[mean_kl(rows[names[keys, values]]) for values in WIDTHS] for keys in WIDTHS]
    least, most = (pick(x for line in losses for x in line if x > 0) for pick in (min, max))
    figure = new_figure(width=5.4)
    axis = figure.subplots()
    axis.imshow([[max(x, least) for x in line] for line in losses], cmap="YlOrRd", norm=LogNorm(least, 5 * most))
    for y, keys in enumerate(WIDTHS):
        for x, values in enumerate(WIDTHS):
            row, loss = rows[names[keys, values]], losses[y][x]
            text = f"{loss:.4f}\n{row['bits'][BITS_AT]:.2f} bits" if loss else "0\nBF16"
            axis.text(x, y, text, ha="center", va="center", fontsize=9)
    axis.set_xticks(range(len(WIDTHS)), [str(width) for width in WIDTHS])
    axis.set_yticks(range(len(WIDTHS)), [str(width) for width in WIDTHS])
    axis.set(xlabel="bits of values", ylabel="bits of keys")
    axis.grid(False)
    figure.suptitle(f"KL to BF16, nats per token: {measured.name}, recipe focus", fontsize=10)
    save(figure, path)
