"""The serving experiments of the OSCAR paper (arXiv 2605.17757), each by its name, with SGLang's own load generator.

    python benchmark/serving/bench_paper.py table8                      # where a step of decoding goes, by requests
    python benchmark/serving/bench_paper.py table9                      # 32 requests, 8,192 tokens in, 1,024 out
    python benchmark/serving/bench_paper.py figure4 --modes bf16,fp8,int2
    python benchmark/serving/bench_paper.py figure5 --shape qwen3-4b    # 100K tokens in, up to 256 requests
    python benchmark/serving/bench_paper.py figure6                     # 100K in: no cache, cold, everything a hit
    python benchmark/serving/bench_paper.py table9 --model models/reference --shrink 32  # smoke test on a CPU
    python benchmark/serving/bench_paper.py table8:1+32,table9,figure4:1  # some of their loads; servers start once
    python benchmark/serving/report_paper.py results/*.json             # the page beside the paper's figures

Weights are random, as they do not change what a step costs; prompts are ``random-ids`` of ``sglang.benchmark.serving``,
which sends them, waits, and counts. A batch that does not fit a cache at once is still served; its requests wait for
each other, and ``running`` says how many ran. Table 8 is different: what does not fit is not measured, and its row says
so (``fits``). Its prompts are computed once and decoded from the prefix cache, and a step goes by kinds of kernels as
in ``step_profile.py``; its context is our reading, see ``paper_loads.py``. Without a GPU there is no trace: a row has
the milliseconds of a step only.

A prompt of 100,000 tokens takes the better part of ten seconds to compute for 8 B parameters. A quarter of the layers
in a quarter of the memory, ``--shape qwen3-8b:9 --server-args "--mem-fraction-static 0.22"``, keeps what fits and what
a layer costs, and takes a quarter of the time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import decode_log
import load_generator
import typer
from machine import describe
from paper_loads import EXPERIMENTS, OFF, STEPS, Load, chosen
from paper_rows import layers_of, step_row, throughput_row
from rich.console import Console
from rich.table import Table
from room import room_of
from shapes import SHAPES, write_model
from subjects import MODES

from oscar_cpu.server import has_gpu
from oscar_tools.local_server import serve

Rows = dict[str, list[dict[str, Any]]]
"""Rows of a result by cache."""
NO_FILE_NAME = str.maketrans({",": "_", ":": "-"})
"""What experiments have in their names and files should not."""


def servers(loads: list[tuple[str, Load]]) -> Iterator[tuple[list[str], list[tuple[str, Load]]]]:
    """Further flags of a server, and the experiments' loads that it is asked: one without prefix cache where a load
    wants that."""
    for off in (True, False):
        asked = [(name, load) for name, load in loads if (load.cache == OFF) == off]
        if asked:
            yield ["--disable-radix-cache"] if off else [], asked


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row for a table: milliseconds by kind are columns, single kernels are left out."""
    return {key: value for key, value in row.items() if key not in ("ms", "longest")} | row.get("ms", {})


def show(rows: Rows) -> None:
    """A table of every experiment."""
    for name in dict.fromkeys(row["experiment"] for found in rows.values() for row in found):
        lines = [(mode, flat(row)) for mode, found in rows.items() for row in found if row["experiment"] == name]
        columns = list(dict.fromkeys(key for _, row in lines for key in row))
        table = Table("cache", *columns)
        for mode, row in lines:
            table.add_row(mode, *(str(row.get(key, "-")) for key in columns))
        Console(width=200).print(table)


def main(
    experiments: Annotated[
        str, typer.Argument(help=f"of {', '.join(EXPERIMENTS)}, with commas; NAME:1+32 is some of its requests at once")
    ],
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2,k2v2",
    shrink: Annotated[int, typer.Option(help="divides prompts and answers; for a smoke test", min=1)] = 1,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path | None, typer.Option(help="result as JSON; default: results/EXPERIMENTS.json")] = None,
) -> None:
    """Measure experiments with every cache, on one server each where all want the same one."""
    try:
        loads = chosen(experiments, shrink)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if unknown := [name for name in modes.split(",") if name not in MODES]:
        raise typer.BadParameter(f"no {unknown[0]}; there are {', '.join(MODES)}", param_hint="--modes")
    out = out or Path("results") / f"{experiments.translate(NO_FILE_NAME)}.json"
    result: dict[str, Any] = describe() | {"shape": model.name if model else shape}
    result["weights"] = "those of the model" if model else "random"
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        served = model or Path(temporary)
        try:
            if not model:
                write_model(served, shape, tokenizer=True)
            layers = layers_of(served) if any(name == STEPS for name, _ in loads) else 0
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        out.parent.mkdir(parents=True, exist_ok=True)
        load_generator.prepare()
        weights = [] if model else ["--load-format", "dummy"]
        flags = ["--mem-fraction-static", "0.85", *weights, *decode_log.FLAGS, *server_args.split()]
        for mode in modes.split(","):
            rows[mode] = []
            for more, asked in servers(loads):
                log = out.with_suffix(f".{mode}{''.join(more)}.log")
                with serve(served, log, [*flags, *MODES[mode].args, *more], MODES[mode].environment(served)) as server:
                    room = room_of(server)
                    result.setdefault("servers", {})[mode] = MODES[mode].facts(server)
                    result["gpus"] = room.gpus if has_gpu() else 0
                    for name, load in asked:
                        if name == STEPS:
                            row = step_row(server, served, load, room, layers if has_gpu() else 0)
                        else:
                            row = throughput_row(server, served, load, room.gpus)
                        rows[mode].append({"experiment": name} | row)
                        print(mode, flat(rows[mode][-1]), flush=True)
                        out.write_text(json.dumps(result | {"rows": rows}, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    typer.run(main)
