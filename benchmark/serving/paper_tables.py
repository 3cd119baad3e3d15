"""Tables of a report: what a run measured, and under it what the OSCAR paper has for the same load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from paper_figures import FIGURE4_BATCH, FIGURE4_CONTEXT, TABLE8, TABLE9
from paper_loads import EXPERIMENTS, STEPS, Load
from paper_results import BF16, FP8, Result, Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from accuracy.report import table

KINDS = ("matrix products", "attention", "store", "other", "idle", "total")
"""Columns of a step, milliseconds."""
STEP_HEAD = ["requests", "cache", *KINDS, "log", "attention / BF16", "total / BF16", "attention / FP8", "total / FP8"]
LOAD_HEAD = ["requests", "prompt", "answer", "prefix cache", "cache", "U", "G", "U / BF16", "G / BF16", "U / FP8",
             "G / FP8", "first token, ms", "at once", "cached"]  # fmt: skip
NOTHING = "-"


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A share in percent, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.0%}"


def step_table(result: Result) -> Iterator[str]:
    """Table 8: milliseconds of a step by kind, and how many times faster attention and the step are."""
    body = []
    for load in result.loads(STEPS):
        for mode in result.modes(STEPS):
            row = result.row(mode, STEPS, load)
            if row is None:
                continue
            head = [str(load.requests), result.label(mode)]
            if not row["fits"]:
                body.append(not_fitting(head, row))
                continue
            ratios = [
                number(result.ratio(mode, bases, STEPS, load, kind, time=True), 2)
                for bases in (BF16, FP8)
                for kind in ("attention", "total")
            ]
            times = [number(result.value(mode, STEPS, load, key), 2) for key in (*KINDS, "ms_per_step")]
            body.append([*head, *times, *ratios])
        body += paper_steps(result, load)
    yield from table(STEP_HEAD, body)


def not_fitting(head: list[str], row: Row) -> list[str]:
    """A row of a load that does not fit the cache at once, by its tokens or by how many requests ran."""
    why = f"{row.get('running', row['room_requests'])} at once"
    if row["needed"] > row["room"]:
        why = f"{row['needed']:,} tokens in {row['room']:,}"
    return [*head, f"does not fit: {why}", *[NOTHING] * (len(STEP_HEAD) - 3)]


def paper_steps(result: Result, load: Load) -> list[list[str]]:
    """The paper's rows of a load; only their ratios beside a run that leaves out layers."""
    methods = TABLE8.get(result.model, {}) if load in EXPERIMENTS[STEPS] else {}
    body = []
    for method, steps in methods.items():
        step, base = steps[load.requests], methods["BF16"][load.requests]
        head = [str(load.requests), f"the paper: {method}"]
        if step is None:
            body.append([*head, "does not fit", *[NOTHING] * (len(STEP_HEAD) - 3)])
            continue
        times = [step.products, step.attention, step.store, step.other, None, step.total, None]
        shown = [number(took if result.whole else None, 1) for took in times]
        ratios = (None, None) if base is None else (base.attention / step.attention, base.total / step.total)
        body.append([*head, *shown, *(number(ratio, 2) for ratio in ratios), NOTHING, NOTHING])
    return body


def throughput_table(result: Result, experiment: str) -> Iterator[str]:
    """Table 9 and figures 4 to 6: tokens per second, and how many times those of BF16 and of FP8."""
    body = []
    for load in result.loads(experiment):
        head = [f"{load.requests:,}", f"{load.prompt:,}", f"{load.answer:,}", load.cache]
        for mode in result.modes(experiment):
            if result.row(mode, experiment, load) is None:
                continue
            cells = [number(result.value(mode, experiment, load, key), 1) for key in ("U", "G")]
            for bases in (BF16, FP8):
                cells += [number(result.ratio(mode, bases, experiment, load, key), 2) for key in ("U", "G")]
            cells.append(number(result.value(mode, experiment, load, "first_token_ms"), 0))
            cells.append(number(result.value(mode, experiment, load, "running"), 0))
            cells.append(share(result.value(mode, experiment, load, "cached_share")))
            body.append([*head, result.label(mode), *cells])
        body += [[*head, *row] for row in paper_throughput(result, experiment, load)]
    yield from table(LOAD_HEAD, body)


def paper_throughput(result: Result, experiment: str, load: Load) -> list[list[str]]:
    """The paper's rows of a load, from the name on; only their ratios beside a run that leaves out layers."""
    if load not in EXPERIMENTS[experiment]:
        return []
    found: list[tuple[str, float | None, float | None, float | None, float | None]] = []
    if experiment == "table9" and result.model in TABLE9:
        base = TABLE9[result.model]["BF16"]
        for method, speed in TABLE9[result.model].items():
            own = (speed.U, speed.G) if result.whole else (None, None)
            found.append((method, *own, speed.U / base.U, speed.G / base.G))
    if experiment == "figure4":
        user = FIGURE4_CONTEXT.get(result.model, {}).get(load.prompt) if load.requests == 1 else None
        job = FIGURE4_BATCH.get(result.model, {}).get(load.requests) if load.prompt == 100_000 else None
        if user or job:
            found.append(("OSCAR", None, None, user, job))
    return [
        [f"the paper: {method}", number(user, 1), number(gpu, 1), number(of_user, 2), number(of_gpu, 2), *[NOTHING] * 5]
        for method, user, gpu, of_user, of_gpu in found
    ]
