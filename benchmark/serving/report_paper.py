"""A page with our figures beside the OSCAR paper's (arXiv 2605.17757), and plots, from results of the two benchmarks.

    python benchmark/serving/report_paper.py results/h200/paper_*.json results/h200/step_*.json --out results/paper.md

Takes results of ``bench_paper.py`` and ``bench_step.py``, of one card or of several. Plots go into ``figures`` beside
the page (matplotlib: ``pip install 'sglang-oscar[plots]'``). What was not measured is not on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import paper_plots
import typer
from paper import FIGURE4, TABLE8, TABLE9

BF16, FP8 = ("bf16", "fa3"), ("fp8", "fa3_fp8")
"""Rivals of one width; a ratio is to the best of those that a run has."""
NAMES = {
    "bf16": "BF16, FlashInfer",
    "fa3": "BF16, FlashAttention-3",
    "fp8": "FP8, FlashInfer",
    "fa3_fp8": "FP8, FlashAttention-3",
    "exact": "int2 mode with 16 bits",
    "int2": "INT2",
    "k3v2": "keys in 3 bits, values in 2",
    "k4v2": "keys in 4 bits, values in 2",
}
TITLES = {
    "table8": "Table 8: where a step goes",
    "table9": "Table 9: 32 requests of 8,192 tokens, answers of 1,024",
    "figure4": "Figure 4: decoding behind a cached prompt",
    "figure5": "Figure 5: prompts of 100,000 tokens, more and more requests",
    "figure6": "Figure 6: the prefix cache off, empty, and full",
}


INTRODUCTION = """\
Made by `benchmark/serving/report_paper.py` from results of `bench_paper.py` and `bench_step.py`. U is tokens per second
of a user, the inverse of the median time between tokens; G tokens per second of the GPU, from the first request to the
last answer. Ratios are to the best BF16 and the best FP8 of the same run. Rows in italics are the paper's (arXiv
2605.17757): one H100 of 80 GB, its own version of SGLang, trained weights. Ours have random weights and prompts of
random tokens; NAME:N is a model with N of its layers."""


@dataclass(frozen=True)
class Run:
    """What one experiment found on one card in one shape; rows by cache."""

    experiment: str
    gpu: str
    shape: str
    facts: dict[str, Any] = field(compare=False)
    rows: dict[str, list[dict[str, Any]]] = field(compare=False)

    @property
    def name(self) -> str:
        """Of its plot."""
        return f"paper-{self.experiment}-{self.gpu}-{self.shape}".lower().replace(" ", "-").replace(":", "-")

    def best(self, modes: tuple[str, ...], key: str, **where: Any) -> float | None:
        """The largest value among some caches; None where none was measured."""
        found = [row[key] for mode in modes for row in self.rows.get(mode, []) if matches(row, where) and row.get(key)]
        return max(found, default=None)


def matches(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a row has these values."""
    return all(row.get(name) == value for name, value in where.items())


def runs_of(results: list[dict[str, Any]]) -> list[Run]:
    """Results by experiment, card and shape, in the order of the paper.

    Raises:
        ValueError: a result is of another benchmark, or two are of the same experiment, card and shape.
    """
    runs: dict[tuple[str, str, str], Run] = {}
    for result in results:
        if not isinstance(result, dict) or not isinstance(result.get("rows"), dict) or "shape" not in result:
            raise ValueError("not a result of bench_paper.py or bench_step.py")
        gpu = (result.get("gpu") or "CPU").removeprefix("NVIDIA ")
        facts = {name: result.get(name) for name in ("python", "sglang", "torch", "triton", "command")}
        for mode, row in ((mode, row) for mode, rows in result["rows"].items() for row in rows):
            experiment = row.get("experiment") or result.get("experiment")
            if experiment not in TITLES:
                raise ValueError(f"no experiment {experiment}; there are {', '.join(TITLES)}")
            key = (experiment, gpu, result["shape"])
            run = runs.setdefault(key, Run(*key, facts, {}))
            if run.facts is not facts:
                # Ratios are within a run: rows of two are not put together.
                raise ValueError(f"two results have {experiment} of {result['shape']} on {gpu}")
            run.rows.setdefault(mode, []).append(row)
    order = list(TITLES)
    return sorted(runs.values(), key=lambda run: (order.index(run.experiment), run.gpu, run.shape))


def ratio(value: float | None, base: float | None) -> str:
    """How many times the base, for a table."""
    return f"{value / base:.2f}" if value and base else "-"


def table(columns: list[str], rows: list[list[Any]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join('-' if cell is None else str(cell) for cell in row)} |"


def step_table(run: Run) -> Iterator[str]:
    """Milliseconds by kind; the paper's below ours where the shape is the same."""
    kinds = ("matrix products", "attention", "store", "other", "idle", "ms")
    rows: list[list[Any]] = []
    for mode, found in run.rows.items():
        for row in found:
            name = [NAMES.get(mode, mode), row["requests"]]
            rows.append([*name, *(row.get(kind) for kind in kinds)] if row["fits"] else [*name, *["does not fit"] * 6])
    if run.shape == "qwen3-8b":
        for cache, steps in TABLE8.items():
            rows += [[f"*paper: {cache}*", n, *(kinds_of.get(kind) for kind in kinds)] for n, kinds_of in steps.items()]
    yield from table(["cache", "requests", *kinds[:-1], "ms a step"], rows)


def throughput_table(run: Run) -> Iterator[str]:
    """Tokens per second of a user and of the GPU."""
    bases = run.best(BF16, "U"), run.best(BF16, "G"), run.best(FP8, "G")
    rows = [
        [NAMES.get(mode, mode), row["U"], row["G"], ratio(row["U"], bases[0]), *(ratio(row["G"], b) for b in bases[1:])]
        for mode, found in run.rows.items()
        for row in found
    ]
    theirs = TABLE9.get(run.shape, {})
    for cache, (user, gpu) in theirs.items():
        base_user, base_gpu = theirs["BF16"]
        rows.append([f"*paper: {cache}*", user, gpu, ratio(user, base_user), ratio(gpu, base_gpu), "-"])
    yield from table(["cache", "U", "G", "U over BF16", "G over BF16", "G over FP8"], rows)


def load_table(run: Run) -> Iterator[str]:
    """A row for every load and cache, with what ran at once."""
    rows: list[list[Any]] = []
    keys = ("prompt", "requests", "cache")
    loads = dict.fromkeys(tuple(row[key] for key in keys) for found in run.rows.values() for row in found)
    for load in loads:
        where = dict(zip(keys, load, strict=True))
        bases = [run.best(modes, "G", **where) for modes in (BF16, FP8)]
        alone = [run.best(modes, "U", **where) for modes in (BF16, FP8)]
        for mode, found in run.rows.items():
            for row in (row for row in found if matches(row, where)):
                # One request decodes: its speed is that of the steps, without the time of its prompt.
                key, base = ("U", alone) if run.experiment == "figure4" and row["requests"] == 1 else ("G", bases)
                cells = [row["U"], row["G"], row["running"], row["cached_share"], *(ratio(row[key], b) for b in base)]
                rows.append([f"{row['prompt']:,}", row["requests"], row["cache"], NAMES.get(mode, mode), *cells])
        stated = FIGURE4.get(run.shape, {}).get((where["requests"], where["prompt"]))
        if run.experiment == "figure4" and stated:
            rows.append([f"{where['prompt']:,}", where["requests"], "hit", "*paper: OSCAR*", *["-"] * 4, stated, "-"])
    names = ["prompt", "requests", "prefix cache", "cache", "U", "G", "running", "cached", "over BF16", "over FP8"]
    yield from table(names, rows)


def page(runs: list[Run], figures: str, plotted: set[str]) -> str:
    """The page in Markdown.

    Args:
        runs: of :func:`runs_of`.
        figures: folder of plots relative to the page.
        plotted: names of runs that have one.
    """
    lines = ["# The paper's serving experiments", "", INTRODUCTION]
    told: dict[str, None] = {}
    for experiment, title in TITLES.items():
        found = [run for run in runs if run.experiment == experiment]
        if not found:
            continue
        lines += ["", f"## {title}"]
        for run in found:
            told[f"- {run.gpu}, {run.shape}: " + ", ".join(f"{k} {v}" for k, v in run.facts.items() if k != "command")
                 + f"; `{run.facts['command']}`"] = None  # fmt: skip
            lines += ["", f"**{run.shape} on one {run.gpu}**", ""]
            if run.name in plotted:
                lines += [f"![{title}, {run.shape}, {run.gpu}]({figures}/{run.name}.svg)", ""]
            makers = {"table8": step_table, "table9": throughput_table}
            lines += makers.get(experiment, load_table)(run)
    return "\n".join([*lines, "", "## Runs", "", *told, ""])


def main(
    results: Annotated[list[Path], typer.Argument(help="of bench_paper.py and bench_step.py", exists=True)],
    out: Annotated[Path, typer.Option(help="the page; plots go into figures beside it")] = Path("results/paper.md"),
) -> None:
    """Write the page and its plots."""
    try:
        runs = runs_of([json.loads(path.read_text(encoding="utf-8")) for path in results])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    plotted = {run.name for run in runs if paper_plots.draw(run, out.parent / "figures" / f"{run.name}.svg")}
    out.write_text(page(runs, "figures", plotted), encoding="utf-8")
    print(f"wrote {out} and {len(plotted)} plots")


if __name__ == "__main__":
    typer.run(main)
