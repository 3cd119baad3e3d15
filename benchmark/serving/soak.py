"""Soak test: thousands of mixed requests against one int2 server; nothing may break, leak or get worse.

Requests are drawn from eight kinds: retrieval questions on fresh documents, questions on documents asked before (prefix
hits), second turns on generated text, unscored prompts of 10 to tens of thousands of tokens, requests that the client
abandons, answers bound to a JSON schema or a regular expression, several sampled answers to a prompt, and answers with
log probabilities. The server retracts requests at random (SGLANG_TEST_RETRACT) and checks its memory accounts strictly
while idle and busy. The history pool is small against what passes through it, so prefixes are evicted and requests
retracted for want of room all the time. ``--poison N`` adds storage or drafts, and what :mod:`poison` says.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from machine import describe
from poison import PoisonClient, poisoned_copy, server_arguments
from soak_client import ROOT, Client
from subjects import Mode, connector

from oscar_cpu.server import environment, has_gpu
from oscar_tools.local_server import LocalServer, serve

MODEL = ROOT / "models" / "reference"
LARGEST_DROP = 3.0
"""Standard errors by which the score may fall between the beginning and the end."""


def main(
    k_rotation: Annotated[str, typer.Option(help="rotation file or recipe for keys")],
    v_rotation: Annotated[str, typer.Option(help="rotation file or recipe for values")],
    model: Annotated[Path, typer.Option(help="folder of a model that scripts/train_reference_model.py made")] = MODEL,
    requests: Annotated[int, typer.Option(min=10)] = 2000,
    concurrency: Annotated[int, typer.Option(min=1)] = 64,
    longest: Annotated[int, typer.Option(help="tokens of the longest prompt")] = 30000,
    group: Annotated[int, typer.Option(help="quantization group size")] = 64,
    tokens: Annotated[int, typer.Option(help="tokens of the history pool: small ones force eviction")] = 65_536,
    part: Annotated[int, typer.Option(min=5, help="requests at the beginning and at the end that are compared")] = 500,
    poison: Annotated[
        int,
        typer.Option(
            help="every so many requests one has a token whose embedding is NaN, which nobody else may notice"
        ),
    ] = 0,
    drafts: Annotated[bool, typer.Option(help="with --poison: drafts of NGRAM instead of storage")] = False,
    server_args: Annotated[str, typer.Option(help="further flags for the server")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; the log goes beside it")] = Path("results/soak.json"),
) -> None:
    """Run the soak test, on the shipped model by default; the exit status is 0 if nothing broke."""
    env = environment() | {
        "SGLANG_OSCAR_K_ROTATION_PATH": k_rotation,
        "SGLANG_OSCAR_V_ROTATION_PATH": v_rotation,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "25",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    args = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(group), "--max-total-tokens", str(tokens)]
    args += ["--mem-fraction-static", "0.5" if has_gpu() else "0.2", "--enable-cache-report"]
    args += ["--context-length", str(max(32768, longest + 2048)), *server_args.split()]

    async def drive(server: LocalServer) -> Client:
        async with aiohttp.ClientSession(connector=connector()) as session:
            what = server.url, session, 0, longest, model
            client = PoisonClient(server, *what, every=poison) if poison else Client(*what)
            await client.run(requests, concurrency)
            return client

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        served, folder = model, Path(made)
        if poison:
            served = poisoned_copy(model, folder / model.name)
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "pages")
            args = [*server_arguments(folder / "drafts.jsonl" if drafts else None), *args]
        with serve(served, out.with_suffix(".log"), args, env) as server:
            facts = Mode(args, env).facts(server)
            begin = time.monotonic()
            client = asyncio.run(drive(server))
            seconds = time.monotonic() - begin
            time.sleep(2)
            alive, log = server.healthy(), server.text()
    tally = client.tally
    faults = [line for line in log.splitlines() if "Traceback" in line or "leak" in line.lower()]
    usage = [float(found) for found in re.findall(r"token usage: ([0-9.]+)", log)]
    scores = {
        "compared_requests": part,
        "first": round(tally.score(slice(0, part)), 4),
        "last": round(tally.score(slice(-part, None)), 4),
        "drop_in_standard_errors": round(tally.drop(part), 2),
    }
    result: dict[str, Any] = {
        **describe(),
        "server": facts,
        "model": model.name,
        "requests": requests,
        "seconds": round(seconds, 1),
        "counts": tally.counts,
        "pool_tokens": tokens,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "cached_tokens": tally.cached_tokens,
        "largest_pool_usage": max(usage, default=0.0),
        "retractions": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log))),
        **(client.report or scores),
        "errors": tally.errors[:20],
        "log_faults": faults[:20],
        "alive": alive,
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if tally.errors or faults or not alive or tally.drop(part) > LARGEST_DROP:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
