"""The Markdown report: tables and plots of a run's results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Rows = dict[str, Any]
PLUS_AND_PAPER = (("OSCAR g128", "plus g128"), ("OSCAR g64", "plus g64"))
TITLES = {
    "plus": "The recipe plus, part by part",
    "factors": "Factors and targets of the rotation (the paper's table 4)",
    "order": "Order of the eigenvectors",
    "targets": "Targets of values, and levels",
    "windows": "Windows (the paper's table 5)",
    "calibration": "Calibration volume and text (the paper's table 7)",
    "focus": "The recipe focus, part by part",
    "domains": "The recipe focus, by calibration text",
    "bits": "Bits of keys and values",
    "broad bits": "Bits, calibrated on all kinds of text",
    "chart": "Every width of keys with every width of values",
    "codebooks": "Codebooks of pairs and fours of channels",
    "broad codebooks": "Codebooks of pairs of channels, calibrated on all kinds of text",
    "beyond": "Beyond the recipe focus",
}
BASES = {
    "plus": ("OSCAR g128", "plus g128"),
    "chart": ("plus g128", "focus g128, served form"),
    "codebooks": tuple(f"plus g{n}{points}" for n in (128, 64) for points in ("", ", 16 points per pair")),
    **dict.fromkeys(("beyond", "broad codebooks"), ("focus g64, served form, calibrated on all kinds, 41K tokens",)),
    **dict.fromkeys(("focus", "domains", "bits", "broad bits"), ("plus g128", "plus g64", "focus g128", "focus g64")),
}
"""Rows of the main table that a table of variants begins with; :data:`PUBLISHED` where nothing is said."""
PUBLISHED = ("OSCAR g128", "OSCAR g64")
BETWEEN = ("keys x4", "keys x32, values x16")
"""Regimes without a main table: their figures lie between those of the others, and are in the results."""


def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the report and its plots.

    Args:
        results: as :mod:`accuracy.run` writes them.
        path: the Markdown file; plots go into ``figures`` beside it.
    """
    from accuracy.plots import draw_all

    models = {
        model: {**found, "regimes": {name: x for name, x in found["regimes"].items() if name not in BETWEEN}}
        for model, found in results["models"].items()
    }
    figures = draw_all({**results, "models": models}, path.parent / "figures")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines(results, figures)).rstrip() + "\n", encoding="utf-8")


def lines(results: dict[str, Any], figures: dict[str, Path]) -> Iterator[str]:
    """The report, line by line."""
    yield from (INTRODUCTION, "")
    yield from ("## Does plus beat the published recipe?", "", QUESTION, "")
    yield from closing(results)
    for model, found in results["models"].items():
        yield from ("", f"## {model} ({found['parameters'] / 1e6:.1f}M parameters)", "")
        yield from outlier_table(found)
        for regime, data in found["regimes"].items():
            if regime in BETWEEN:
                continue
            yield from ("", f"### {model}, {regime}", "")
            if "run" in data:
                text = found.get("calibration")
                yield from (
                    f"Run: {data['run']}." + (f" All methods are calibrated on {text} text." if text else ""),
                    "",
                )
            yield from main_table(data["rows"])
            if f"{model}/{regime}" in figures:
                yield from ("", f"![Errors by layer]({figures[f'{model}/{regime}'].as_posix()})")
        yield from ablations(model, found)
    if "server" in results:
        yield from ("", "## The server", "", SERVER, "")
        yield from server_table(results["server"])
    yield from ("", NOTES)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def interval(estimate: dict[str, float], digits: int) -> str:
    """Mean with its interval."""
    return f"{estimate['mean']:.{digits}f} ({estimate['low']:.{digits}f} to {estimate['high']:.{digits}f})"


def main_table(rows: Rows) -> Iterator[str]:
    """Every method of the main table; where there are further kinds of text, with the KL on each of them.

    Of methods with the same figures, such as two group sizes in heads of the smaller one, the first is shown.
    """
    figures = {
        json.dumps([row[key] for key in ("bits", "language", "retrieval")], sort_keys=True): name
        for name, row in reversed(rows.items())
        if row["table"] == "methods"
    }
    chosen = {name: row for name, row in rows.items() if name in figures.values()}
    kinds = list(dict.fromkeys(kind for row in chosen.values() for kind in row.get("kinds", {})))
    lengths = sorted({n for row in chosen.values() for n in row["retrieval"]}, key=int)
    head = ["method", "bits at 128K", "KL"]
    head += [*(f"KL, {kind}" for kind in kinds), *(f"retrieval, {n}" for n in lengths)]
    body = []
    for name, row in sorted(chosen.items(), key=lambda item: item[1]["language"]["kl"]["mean"]):
        language = row["language"]
        body.append(
            [
                name,
                f"{row['bits']['131072']:.2f}",
                interval(language["kl"], 4),
                *(f"{row['kinds'][kind]['kl']['mean']:.4f}" if kind in row.get("kinds", {}) else "-" for kind in kinds),
                *(f"{row['retrieval'][n]['accuracy']['mean']:.2f}" if n in row["retrieval"] else "-" for n in lengths),
            ]
        )
    yield from table(head, body)


def accuracy_of(row: Rows) -> float:
    """Mean retrieval over lengths."""
    values = [x["accuracy"]["mean"] for x in row["retrieval"].values()]
    return sum(values) / len(values)


def closing(results: dict[str, Any]) -> Iterator[str]:
    """Share of the gap between OSCAR and BF16 that plus closes, per model, regime and group."""
    body = []
    for model, found in results["models"].items():
        for regime, data in found["regimes"].items():
            rows = data["rows"]
            for paper, plus in PLUS_AND_PAPER:
                if paper not in rows or plus not in rows:
                    continue
                old, new, exact = rows[paper], rows[plus], rows["BF16"]
                lost, kept = accuracy_of(exact) - accuracy_of(old), accuracy_of(exact) - accuracy_of(new)
                body.append(
                    [
                        model,
                        regime,
                        paper.split()[1],
                        f"{old['language']['kl']['mean']:.4f}",
                        f"{new['language']['kl']['mean']:.4f}",
                        share(old["language"]["kl"]["mean"], new["language"]["kl"]["mean"]),
                        f"{lost:.3f}",
                        f"{kept:.3f}",
                        share(lost, kept),
                    ]
                )
    head = ["model", "regime", "group", "KL, paper", "plus", "closed", "retrieval lost, paper", "plus", "closed"]
    yield from table(head, body)


def share(gap: float, left: float) -> str:
    """Part of a gap that is closed; a dash where there is hardly a gap."""
    return "-" if gap < 5e-3 else f"{1 - left / gap:.0%}"


def outlier_table(found: dict[str, Any]) -> Iterator[str]:
    """How hard each regime is, means over layers."""
    head = ["regime", "largest / median key channel", "value channel", "kurtosis of keys", "mean's share of key energy",
            "key error left by balancing", "value error", "key energy where queries look least"]  # fmt: skip
    body = []
    for regime, data in found["regimes"].items():
        layers = data["outliers"]

        def mean(pick: Callable[[dict[str, Any]], float], layers: list[dict[str, Any]] = layers) -> float:
            return sum(map(pick, layers)) / len(layers)

        alignment = data["outlier_alignment"]
        body.append(
            [
                regime,
                f"{mean(lambda x: x['k']['channel_ratio']):.1f}",
                f"{mean(lambda x: x['v']['channel_ratio']):.1f}",
                f"{mean(lambda x: x['k']['kurtosis']):.1f}",
                f"{mean(lambda x: x['k']['mean_share']):.2f}",
                f"{mean(lambda x: x['k']['balance']):.3f}",
                f"{mean(lambda x: x['v']['balance']):.3f}",
                f"{sum(alignment) / len(alignment):.2f}",
            ]
        )
    yield from table(head, body)


def ablations(model: str, found: dict[str, Any]) -> Iterator[str]:
    """The ablation tables, regimes side by side."""
    regimes = found["regimes"]
    for name, title in TITLES.items():
        measured = {r: x["rows"] for r, x in regimes.items() if any(y["table"] == name for y in x["rows"].values())}
        if not measured:
            continue
        yield from ("", f"### {model}: {title}", "")
        first_rows = next(iter(measured.values()))
        names = [n for n in BASES.get(name, PUBLISHED) if n in first_rows]
        names += [n for n, row in first_rows.items() if row["table"] == name]
        kinds = list(
            dict.fromkeys(
                kind for rows in measured.values() for n in names for kind in rows.get(n, {}).get("kinds", {})
            )
        )
        columns = ("KL", *(f"KL, {kind}" for kind in kinds), "retrieval")
        head = ["variant", *(f"{r}: {what}" for r in measured for what in columns)]
        body = []
        for variant in dict.fromkeys(names):
            cells = [variant]
            for rows in measured.values():
                row = rows.get(variant)
                if row is None:
                    cells += ["-"] * len(columns)
                    continue
                first = next(iter(row["retrieval"].values()))["accuracy"]["mean"]
                on = [row["language"], *(row.get("kinds", {}).get(kind) for kind in kinds)]
                cells += [*("-" if x is None else f"{x['kl']['mean']:.4f}" for x in on), f"{first:.2f}"]
            body.append(cells)
        yield from table(head, body)
    yield from clip_grid(model, regimes)


def clip_grid(model: str, regimes: dict[str, Any]) -> Iterator[str]:
    """Table 6: KL by clip ratio of keys (rows) and of values (columns)."""
    for regime, data in regimes.items():
        grid = {("0.96", "0.92"): data["rows"].get("OSCAR g128")}
        for name, row in data["rows"].items():
            if row["table"] == "clip":
                k, v = name.rsplit(" ", 1)[1].split("/")
                grid[k, v] = row
        if len(grid) == 1:
            continue
        columns = sorted({v for _, v in grid})
        yield from ("", f"### {model}, {regime}: clip ratios (the paper's table 6), KL", "")
        body = [
            [k, *(f"{grid[k, v]['language']['kl']['mean']:.4f}" if (k, v) in grid else "-" for v in columns)]
            for k in sorted({k for k, _ in grid})
        ]
        yield from table(["keys \\ values", *columns], body)


def server_table(server: dict[str, Any]) -> Iterator[str]:
    """The laboratory's figures beside those of real servers."""
    head = ["method", "group", "nats per token, laboratory", "server", "largest difference of one question",
            "retrieval, laboratory", "server", "same verdict"]  # fmt: skip
    body = [
        [
            row["method"],
            str(row["group"]),
            f"{row['laboratory']['nll']:.4f}",
            f"{row['server']['nll']:.4f}",
            f"{row['worst']:.3f}",
            f"{row['laboratory']['retrieval']:.2f}",
            f"{row['server']['retrieval']:.2f}",
            f"{row['same']} of {row['questions']}",
        ]
        for row in server["rows"]
    ]
    yield from table(head, body)


INTRODUCTION = """# Accuracy, in tables

Every cache format inside a Hugging Face model, and real servers beside it.
[docs/accuracy.md](../../docs/accuracy.md) has the findings; here is what was measured, with remarks at the end.

Made by `python benchmark/accuracy/run.py`. A section names its run: size of the sample, device, and how long
all regimes of the model took.

* **Models.** `SmolLM2-135M-Instruct` is a real language model, as `scripts/real_model.sh` makes it, measured as it is
  on four kinds of text; the KL without a kind is that of source text. `reference` is the shipped model; `strong` is
  what `scripts/train_reference_model.py --preset strong` trains. These two are measured as trained and with outliers
  that change nothing but the cache: keys of one rotary pair per layer times a factor and queries divided by it, one
  value channel per kv head times a factor and its columns of `o_proj` divided by it.
* **Semantics.** Those of the server: sink of 64 tokens, recent window of 256, a chunk of a prompt exact to itself,
  every older token as its quantizer gives it back; errors of a layer reach the queries of the layers behind it.
  Decoding is teacher-forced: one forward pass with two kinds of keys per query equals decoding token by token, which a
  test shows.
* **Measures.** KL(BF16 || method) of the next-token distribution at the last tokens of long contexts of held-out source
  text, far less noisy than perplexity; and retrieval of a seven-digit number from a document in the prefix cache. In
  brackets 95% intervals (bootstrap over contexts). The results have the others, perplexity and excess nats too.
* **Bits** are computed from what a method stores, scales and windows included, at 128K tokens of context."""

QUESTION = """`plus` was chosen on other documents and other text than these (`--split choice`). Gaps
are to BF16; "closed" is the part of the published recipe's gap that `plus` removes at the same bits, a dash where there
is less than half a percent of a gap."""

SERVER = """The same questions over HTTP: the document is cached by a first request, the question arrives behind it, its
tokens' log probabilities and the greedy answer come from the server. The files it serves were written by the
laboratory. Differences are those of BF16 arithmetic (the laboratory computes in float32)."""

NOTES = Path(__file__).with_name("notes.md").read_text(encoding="utf-8").rstrip()
"""How to read the tables: written by hand, after looking at them."""
