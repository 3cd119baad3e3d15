"""Where a step of decoding goes, by cache and number of requests: table 8 of the OSCAR paper (arXiv 2605.17757).

    python benchmark/serving/bench_step.py                                  # 1 to 128 requests of 8,192 tokens
    python benchmark/serving/bench_step.py --requests 8,128 --modes bf16,fp8,fa3,fa3_fp8,int2,k3v2

Milliseconds of GPU kernels by kind (``step_profile.py``), the time in which none runs, and the whole step as SGLang's
log counts it. Prompts come from the prefix cache. Requests that a cache cannot hold at once are not measured, and the
row says so. Weights are random. Needs a GPU: there are no kernels to record elsewhere.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import decode_log
import requests
import typer
from bench_throughput import ask, speed_of
from machine import describe
from paper import STEP_CONTEXT, STEPS
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, config_of
from step_profile import profile_steps
from subjects import MODES, subject

from sglang_oscar.cpu.server import environment, has_gpu
from sglang_oscar.local_server import LocalServer, serve

KINDS = ("matrix products", "attention", "store", "other")


def capacity(server: LocalServer) -> tuple[int, int]:
    """Tokens that a cache holds, and requests that run at once."""
    facts = requests.get(f"{server.url}/server_info", timeout=600).json()
    return facts["max_total_num_tokens"], facts["internal_states"][0]["effective_max_running_requests_per_dp"]


def row_of(count: int, step_ms: float, profile: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds by kind of a step of ``count`` requests.

    Args:
        count: requests at once.
        step_ms: the whole step.
        profile: of :func:`step_profile.profile_steps`.
    """
    spent = profile["us_per_step"]
    kinds = {kind: round(spent.get(kind, 0.0) / 1e3, 3) for kind in KINDS}
    return {"requests": count, "ms": round(step_ms, 3), **kinds, "idle": round(profile["idle_us_per_step"] / 1e3, 3)}


def measure(server: LocalServer, counts: list[int], length: int, tokens: int, layers: int) -> list[dict[str, Any]]:
    """A row for every number of requests; ``fits`` is false in those that the cache has no room for.

    Raises:
        RuntimeError: the server refused requests.
    """
    rows: list[dict[str, Any]] = []
    room, running = capacity(server)
    for count in counts:
        if count > running or count * (length + tokens) > room:
            rows.append({"requests": count, "fits": False})
        else:
            lengths = [length] * count
            ask(server, lengths, 1)
            speed = speed_of(server, lengths, tokens)
            profile = profile_steps(server, partial(ask, server, lengths, tokens), layers)
            rows.append(row_of(count, speed.ms_per_step, profile) | {"fits": speed.running == count})
        print(rows[-1], flush=True)
    return rows


def show(rows: dict[str, list[dict[str, Any]]]) -> None:
    """All rows as one table."""
    columns = ("requests", *KINDS, "idle", "ms")
    table = Table("cache", *columns)
    for mode, found in rows.items():
        for row in found:
            table.add_row(mode, *(str(row.get(column, "does not fit" if column == "ms" else "")) for column in columns))
    Console(width=120).print(table)


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    count: Annotated[str, typer.Option("--requests", help="at once, with commas")] = ",".join(map(str, STEPS)),
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = STEP_CONTEXT,
    tokens: Annotated[int, typer.Option(help="tokens that a request generates")] = 256,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2,k3v2",
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/step.json"),
) -> None:
    """Profile steps of decoding."""
    if not has_gpu():
        raise typer.BadParameter("there is no GPU whose kernels could be recorded")
    if unknown := [name for name in modes.split(",") if name not in MODES]:
        raise typer.BadParameter(f"no {unknown[0]}; there are {', '.join(MODES)}", param_hint="--modes")
    result: dict[str, Any] = describe() | {"shape": shape, "experiment": "table8", "length": length}
    rows: dict[str, list[dict[str, Any]]] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    counts, layers = [int(part) for part in count.split(",")], config_of(shape)["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        what = subject(None, shape, Path(folder))
        for name in modes.split(","):
            mode = MODES[name]
            args = [*what.flags, *decode_log.FLAGS, *mode.args, *server_args.split()]
            with serve(what.folder, out.with_suffix(f".{name}.log"), args, environment() | mode.env) as server:
                rows[name] = measure(server, counts, length, tokens, layers)
            out.write_text(json.dumps(result | {"rows": rows}, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    typer.run(main)
