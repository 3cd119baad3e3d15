"""Tokens per second of many long requests at once: stock SGLang with BF16 or FP8 against int2 mode, random weights.

For every number of requests, all are sent at once, each with a prompt of its own, and SGLang's own count of generated
tokens per second is read off its log while as many of them run as fit. ``full`` is as many as fit. A cache that holds
fewer than were sent ends the list: more would not run faster. Prints tokens per second and milliseconds per step.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import decode_log
import typer
from decode_log import Speed, steady
from machine import describe
from room import room_of
from shapes import SHAPES
from subjects import MODES, send_all, subject

from oscar_tools.local_server import LocalServer, serve


def ask(server: LocalServer, lengths: list[int], tokens: int) -> None:
    """Send a request for every prompt length at once and wait for all.

    Raises:
        RuntimeError: the server refused requests.
    """
    refused = [status for status in asyncio.run(send_all(server.url, lengths, tokens)) if status != 200]
    if refused:
        raise RuntimeError(f"{len(refused)} of {len(lengths)} requests were refused, with HTTP status {refused[0]}")


def speed_of(server: LocalServer, lengths: list[int], tokens: int) -> Speed:
    """Send a request for every prompt length at once and read the speed off the log.

    Raises:
        RuntimeError: the server refused requests.
        ValueError: they generated too few tokens.
    """
    before = len(server.text())
    ask(server, lengths, tokens)
    return steady(server.text()[before:])


FULL = "full"
"""As many requests as fit."""


def measure(server: LocalServer, counts: list[str], length: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """One row for every number of requests, or :data:`FULL`, up to the first that does not fit. ``room`` is how many
    tokens the cache holds; speeds are medians of so many repetitions, ``runs`` has all of them.

    Raises:
        RuntimeError: the server refused requests.
    """
    rows, room = [], room_of(server)
    for asked in counts:
        count = room.fitting(length + tokens) if asked == FULL else int(asked)
        runs = [speed_of(server, [length] * count, tokens) for _ in range(repeats)]
        rows.append(
            {
                "requests": count,
                "running": max(run.running for run in runs),
                "tokens_per_s": round(median(run.tokens_per_s for run in runs), 1),
                "ms_per_step": round(median(run.ms_per_step for run in runs), 2),
                "room": room.tokens,
                "runs": [round(run.tokens_per_s, 1) for run in runs],
            }
        )
        print(rows[-1], flush=True)
        if rows[-1]["running"] < count:
            break
    return rows


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = 16_384,
    requests: Annotated[str, typer.Option(help=f"numbers of requests, or {FULL}, separated by commas")] = "8,48,128",
    tokens: Annotated[int, typer.Option(help="tokens that a request generates")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="how often each number of requests is sent")] = 1,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, separated by commas")] = "bf16,int2",
    server_args: Annotated[str, typer.Option(help="further flags for both servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/throughput.json"),
) -> None:
    """Measure how many tokens per second a full card generates."""
    result: dict[str, Any] = describe() | {"shape": shape, "length": length}
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = requests.split(",")
    with tempfile.TemporaryDirectory() as folder:
        what = subject(None, shape, Path(folder))
        common = [*what.flags, *decode_log.FLAGS, *server_args.split()]
        for name in modes.split(","):
            mode, log = MODES[name], out.with_suffix(f".{name}.log")
            with serve(what.folder, log, [*common, *mode.args], mode.environment(what.folder)) as server:
                result.setdefault("servers", {})[name] = mode.facts(server)
                result[name] = measure(server, counts, length, tokens, repeats)
            out.write_text(json.dumps(result, indent=2) + "\n")
    best = {name: max(row["tokens_per_s"] for row in result[name]) for name in modes.split(",")}
    for base, speed in best.items():
        if MODES[base].stock:
            result[f"over_{base}"] = {name: round(best[name] / speed, 2) for name in best if name != base}
            print(f"as many tokens per second as {base}, times: {result[f'over_{base}']}", flush=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
