"""Is the memory account true? Starts int2 servers in the shapes of real models (random weights) and loads them.

Compares what the start-up account says with what the card reports, then sends as many requests at once as the server
admits, with prompts of up to ``--longest`` tokens, until they hold ``--fill`` of the pool; nothing may run out of
memory. The pool itself is allocated at start-up: what load adds are activations and tables.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, used_bytes
from shapes import SHAPES
from subjects import MODES, send_all, subject

from oscar_tools.local_server import LocalServer, serve

TOLERANCE = 0.02
ANSWER = 512
"""Tokens that every request generates."""


def account(log: str) -> dict[str, float]:
    """The start-up account and the memory that SGLang found free around it, in GiB."""

    def number(pattern: str, otherwise: float | None = None) -> float:
        found = re.search(pattern, log)
        if found:
            return float(found[1])
        if otherwise is None:
            raise ValueError(f"the server's log has no line with {pattern}")
        return otherwise

    said = {
        "pool_tokens": number(r"history pool: (\d+) tokens"),
        "pool_gib": number(r"history pool: .*? bytes = ([\d.]+) GiB"),
        "windows_gib": number(r"window buffers: ([\d.]+) GiB"),
        "extend_gib": number(r"extend workspace: ([\d.]+) GiB", otherwise=0.0),  # none with the Triton kernel
        "max_running": number(r"for at most (\d+) running requests"),
    }
    loaded = number(r"Load weight end\..*?avail mem=([\d.]+) GB")
    ready = number(r"Capture \w+ \w+ CUDA graph begin\..*?avail mem=([\d.]+) GB")
    said["account_gib"] = round(said["pool_gib"] + said["windows_gib"] + said["extend_gib"], 3)
    said["allocated_gib"] = round(loaded - ready, 3)
    said["free_when_ready_gib"] = number(r"available_gpu_mem=([\d.]+) GB")
    return said


async def load(url: str, tokens: int, requests: int, longest: int) -> tuple[int, int]:
    """Send one prompt of ``longest`` tokens and ``requests`` - 1 shorter ones at once, ``tokens`` tokens together.

    Returns:
        failed requests, and the largest number of bytes in use on the GPU.
    """
    peak, done = used_bytes(), False

    async def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, await asyncio.to_thread(used_bytes))
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch())
    # Answers are so long that nobody leaves before everybody is there.
    lengths = [longest, *[max(1, (tokens - longest) // max(requests - 1, 1))] * (requests - 1)]
    statuses = await send_all(url, lengths, ANSWER)
    done = True
    await watcher
    return sum(status != 200 for status in statuses), peak


def check(shape: str, fill: float, longest: int, server_args: list[str], folder: Path) -> dict[str, Any]:
    """Start, compare, load."""
    what, mode = subject(None, shape, folder), MODES["int2"]
    begin = time.monotonic()
    with serve(
        folder, folder / f"{shape}.log", [*what.flags, *server_args, *mode.args], mode.environment(what.folder)
    ) as server:
        row: dict[str, Any] = {"shape": shape, "start_s": round(time.monotonic() - begin, 1), **account(server.text())}
        row["server"] = mode.facts(server)
        row["difference"] = round(row["allocated_gib"] / row["account_gib"] - 1, 4)
        begin = time.monotonic()
        running = int(row["max_running"])
        tokens = int(fill * row["pool_tokens"]) - running * ANSWER
        row["failures"], peak = asyncio.run(load(server.url, tokens, running, min(longest, tokens // 2)))
        row |= {"load_s": round(time.monotonic() - begin, 1), "used_peak_gib": round(peak / 2**30, 2)}
        row |= seen(server)
    return row


def seen(server: LocalServer) -> dict[str, Any]:
    """What the log tells about the load."""
    text = server.text()
    return {
        "running_at_once": max(map(int, re.findall(r"#running-req: (\d+)", text)), default=0),
        "largest_pool_usage": max(map(float, re.findall(r"token usage: ([\d.]+)", text)), default=0.0),
        "out_of_memory": "out of memory" in text.lower(),
        "alive": server.healthy(),
    }


def main(
    shapes: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}, with commas")] = "qwen3-8b,qwen3-32b",
    fill: Annotated[float, typer.Option(help="share of the pool to fill")] = 1.0,
    longest: Annotated[int, typer.Option(help="tokens of the longest prompt")] = 100_000,
    server_args: Annotated[str, typer.Option(help="further flags for the servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON")] = Path("results/memory.json"),
) -> None:
    """Check the account of each shape; the exit status is 0 if all are true and nothing ran out of memory."""
    result: dict[str, Any] = describe() | {"rows": []}
    bad = False
    out.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = check(shape, fill, longest, server_args.split(), Path(folder))
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        bad |= abs(row["difference"]) > TOLERANCE or row["out_of_memory"] or bool(row["failures"]) or not row["alive"]
    out.write_text(json.dumps(result, indent=2) + "\n")
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
