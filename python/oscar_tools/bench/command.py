"""The command ``oscar bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

TABLES = {
    "decode": "attention of one layer to cached tokens, microseconds",
    "verify": "the same for several new tokens of a request",
    "store": "rotating, quantizing and storing new tokens of one layer, microseconds",
    "extend": "attention to prompts of one layer and storing them, microseconds",
}
FEWEST_SECONDS = 10


def bench(
    out: Annotated[Path | None, typer.Option(help="File for the results as JSON; its folder must exist.")] = None,
    seconds: Annotated[
        int, typer.Option(min=FEWEST_SECONDS, help="Time in all; what does not fit is left out and named.")
    ] = 120,
) -> None:
    """Time this GPU's attention kernels against its own read bandwidth and stock ones, in the shapes of Qwen3-8B."""
    import torch

    from oscar_tools.bench.loads import Sizes
    from oscar_tools.bench.measure import Measurement
    from sglang_oscar.attach.gate import check_device
    from sglang_oscar.errors import Int2Error

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{out} is a folder, or in one that does not exist", param_hint="--out")
    if not torch.cuda.is_available():
        _fail("oscar bench needs an NVIDIA GPU that PyTorch can use; oscar doctor says what is missing")
    try:
        check_device("cuda")
        row = Measurement(lambda line: typer.echo(line, err=True)).all(Sizes(), seconds)
    except (Int2Error, RuntimeError) as error:
        _fail(str(error))
    for line in summary(row):
        typer.echo(line)
    if out is not None:
        out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"written: {out}")


def _fail(line: str) -> None:
    typer.echo(f"error: {line}", err=True)
    raise typer.Exit(1)


def summary(row: dict[str, Any]) -> list[str]:
    """Lines for the terminal: a table for every kind of kernel, and what the card is."""
    from oscar_tools.bench.report import printed

    lines = []
    for kind, title in TABLES.items():
        if row[kind]:
            lines += [f"{kind}: {title}", *printed(row[kind]), ""]
    lines += [f"left out: {what} ({why})" for what, why in row["missing"].items()]
    shares = [row[name] for row in row["decode"] for name in row if name.endswith("_of_limit")]
    kernel, bandwidth = row["decode_kernel"], row["read_bandwidth_gb_s"]
    reach = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "an unknown share"
    lines.append(f"{row['gpu']}: the {kernel} kernel reads at {reach} of {bandwidth:,.0f} GB/s; {row['seconds']} s")
    return lines
