"""The serving experiments of the OSCAR paper (arXiv 2605.17757), each by its name, with SGLang's own load generator.

    python benchmark/serving/bench_paper.py table9                      # 32 requests, 8,192 tokens in, 1,024 out
    python benchmark/serving/bench_paper.py figure4 --modes bf16,fp8,int2
    python benchmark/serving/bench_paper.py figure5 --shape qwen3-4b    # 100K tokens in, up to 256 requests
    python benchmark/serving/bench_paper.py figure6                     # 100K in: no cache, cold, everything a hit
    python benchmark/serving/bench_paper.py table9 --model models/reference --shrink 32  # smoke test on a CPU
    python benchmark/serving/bench_paper.py table9,figure4,figure5 --requests 1,8,32     # servers start once

Table 8, where a step goes, is ``step_profile.py``. Weights are random, as they do not change what a step costs;
prompts are ``random-ids`` of ``sglang.bench_serving``, which sends them, waits, and counts. A batch that does not fit a
cache at once is still served; its requests wait for each other, and ``running`` says how many ran.

A prompt of 100,000 tokens takes the better part of ten seconds to compute for 8 B parameters. A quarter of the layers
in a quarter of the memory, ``--shape qwen3-8b:9 --server-args "--mem-fraction-static 0.22"``, keeps what fits and what
a layer costs, and takes a quarter of the time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import decode_log
import typer
from machine import describe
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, config_of, write_model, write_tokenizer
from subjects import MODES

from sglang_oscar.cpu.server import environment
from sglang_oscar.local_server import LocalServer, serve

COLD, HIT, OFF = "cold", "hit", "off"
"""The prefix cache before a measurement: empty; holding every prompt; switched off."""
LIMIT = 7200
"""Seconds that a measurement may take."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: how many, tokens of a prompt and of an answer, and the prefix cache before."""

    requests: int
    prompt: int
    answer: int
    cache: str = COLD


EXPERIMENTS: dict[str, list[Load]] = {
    "table9": [Load(32, 8192, 1024)],
    "figure4": [Load(1, prompt, 1024, HIT) for prompt in (30_000, 60_000, 100_000)]
    + [Load(requests, 100_000, 1024, HIT) for requests in (8, 32)],
    "figure5": [Load(1 << power, 100_000, 1024) for power in range(9)],
    "figure6": [Load(requests, 100_000, 1024, cache) for cache in (OFF, COLD, HIT) for requests in (1, 8, 16, 32)],
}
PAPER: dict[str, dict[str, dict[str, str]]] = {
    "table9": {
        "qwen3-4b": {"bf16": "U 41.1, G 1187.9", "int2": "U 63.3, G 1723.9"},
        "qwen3-8b": {"bf16": "U 35.8, G 999.9", "int2": "U 52.5, G 1374.0"},
    },
    "figure4": {"qwen3-4b": {"int2": "1 request: 1.98, 2.52 and 3.08 times BF16 behind 30K, 60K and 100K tokens"}},
}
"""What the paper has, on an H100 of 80 GB: tokens per second of a user (U) and of the GPU (G), by shape and cache."""


def generate(
    server: LocalServer, model: Path, load: Load, answer: int, flush: bool, warm_up: bool = True
) -> dict[str, Any]:
    """Send a load with ``sglang.bench_serving``; what it reports.

    Args:
        server: to ask.
        model: folder with the tokenizer.
        load: requests and prompts; the same load has the same prompts.
        answer: tokens of an answer.
        flush: whether the prefix cache is emptied before.
        warm_up: whether a request is sent that does not count.

    Raises:
        RuntimeError: it failed, or requests did.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
        command += ["--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids"]
        command += ["--tokenize-prompt", "--random-input-len", str(load.prompt), "--random-output-len", str(answer)]
        command += ["--random-range-ratio", "1", "--num-prompts", str(load.requests), "--disable-tqdm"]
        command += ["--max-concurrency", str(load.requests), "--seed", str(load.prompt + load.requests)]
        command += ["--output-file", str(report), "--warmup-requests", str(int(warm_up))]
        command += ["--flush-cache"] if flush else []
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False
        )
        if done.returncode or not report.is_file():
            raise RuntimeError(f"sglang.bench_serving failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
    if found["completed"] != load.requests:
        raise RuntimeError(f"{load.requests - found['completed']} of {load.requests} requests failed; see {server.log}")
    return found


def measure(server: LocalServer, model: Path, load: Load) -> dict[str, Any]:
    """A row: the load, tokens per second of a user (U) and of the GPU (G), and what came from the prefix cache.

    U is the inverse of the median time between tokens of a request; G is all generated tokens over the time from the
    first request to the last answer.

    Raises:
        RuntimeError: requests failed.
    """
    if load.cache == HIT:
        generate(server, model, load, 1, flush=True)
    before = len(server.text())
    found = generate(server, model, load, load.answer, flush=load.cache == COLD, warm_up=load.cache != HIT)
    log = server.text()[before:]
    cached = sum(int(n) for n in re.findall(r"#cached-token: (\d+)", log))
    running = max((int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", log)), default=0)
    return asdict(load) | {
        "U": round(1000 / found["median_tpot_ms"], 2) if found["median_tpot_ms"] else None,
        "G": round(found["output_throughput"], 1),
        "first_token_ms": round(found["median_ttft_ms"], 1),
        "seconds": round(found["duration"], 2),
        "running": running,
        "cached_share": round(cached / (load.requests * load.prompt), 3),
    }


def servers(loads: list[tuple[str, Load]]) -> Iterator[tuple[list[str], list[tuple[str, Load]]]]:
    """Further flags of a server, and the experiments' loads that it is asked: one without prefix cache where a load
    wants that."""
    for off in (True, False):
        asked = [(name, load) for name, load in loads if (load.cache == OFF) == off]
        if asked:
            yield ["--disable-radix-cache"] if off else [], asked


def chosen(experiments: str, requests: str, shrink: int) -> list[tuple[str, Load]]:
    """Loads by experiment.

    Args:
        experiments: names with commas.
        requests: numbers of requests at once, with commas; empty for all.
        shrink: divides prompts and answers.

    Raises:
        ValueError: there is no such experiment, or nothing is left.
    """
    counts = {int(part) for part in requests.split(",")} if requests else None
    loads = []
    for name in experiments.split(","):
        if name not in EXPERIMENTS:
            raise ValueError(f"no {name}; there are {', '.join(EXPERIMENTS)}")
        loads += [(name, shrunk(load, shrink)) for load in EXPERIMENTS[name] if not counts or load.requests in counts]
    if not loads:
        raise ValueError(f"no load of {requests} requests in {experiments}")
    return loads


def shrunk(load: Load, by: int) -> Load:
    """A load of shorter prompts and answers, which are still long enough for a time between tokens."""
    return replace(load, prompt=max(64, load.prompt // by), answer=max(16, load.answer // by)) if by > 1 else load


def show(rows: dict[str, list[dict[str, Any]]], paper: dict[str, dict[str, str]]) -> None:
    """A table of all rows, and what the paper has."""
    table = Table("cache", *next(iter(rows.values()))[0])
    for mode, found in rows.items():
        for row in found:
            table.add_row(mode, *map(str, row.values()))
    Console(width=140).print(table)
    for name, modes in paper.items():
        for mode, text in modes.items():
            print(f"the paper, H100 80 GB, {name}, {mode}: {text}")


def main(
    experiments: Annotated[str, typer.Argument(help=f"of {', '.join(EXPERIMENTS)}, with commas")],
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2,k3v2",
    requests: Annotated[str, typer.Option(help="only loads of so many requests at once, with commas")] = "",
    shrink: Annotated[int, typer.Option(help="divides prompts and answers; for a smoke test", min=1)] = 1,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path | None, typer.Option(help="result as JSON; default: results/EXPERIMENTS.json")] = None,
) -> None:
    """Measure experiments with every cache, on one server each where all want the same one."""
    try:
        loads = chosen(experiments, requests, shrink)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if unknown := [name for name in modes.split(",") if name not in MODES]:
        raise typer.BadParameter(f"no {unknown[0]}; there are {', '.join(MODES)}", param_hint="--modes")
    out = out or Path("results") / f"{experiments.replace(',', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for name, _ in loads)
    paper = {} if model else {name: PAPER[name][shape] for name in names if shape in PAPER.get(name, {})}
    result: dict[str, Any] = describe() | {"shape": model.name if model else shape}
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        served = model or Path(temporary)
        if not model:
            write_model(served, shape)
            write_tokenizer(served, config_of(shape))
        weights = [] if model else ["--load-format", "dummy"]
        flags = ["--mem-fraction-static", "0.85", *weights, *decode_log.FLAGS, *server_args.split()]
        for mode in modes.split(","):
            rows[mode] = []
            for more, asked in servers(loads):
                log = out.with_suffix(f".{mode}{''.join(more)}.log")
                with serve(served, log, [*flags, *MODES[mode].args, *more], environment() | MODES[mode].env) as server:
                    for name, load in asked:
                        rows[mode].append({"experiment": name} | measure(server, served, load))
                        print(mode, rows[mode][-1], flush=True)
                        out.write_text(json.dumps(result | {"rows": rows, "paper": paper}, indent=2) + "\n")
    show(rows, paper)


if __name__ == "__main__":
    typer.run(main)
