"""How many conversations of many turns a fixed host memory keeps, by cache: BF16, FP8, INT2 and others.

The load is of the kind of SGLang's own ``benchmark/hicache/bench_multiturn.py``. Sessions take turns: when one comes
again, the others have pushed its history off a device pool that is small, and it is on the host, or gone where the host
could not keep all. For every cache one server with the same bytes of host memory, and for every number of sessions an
empty cache. Of the turns after the first:

* hit rate: the share of the tokens of earlier turns that came from the prefix cache, on the device or on the host, as
  SGLang says. Int2 mode computes the last tokens of a prompt again (256 by default): they are part of the question
  where that is as long;
* time to the first token, as a streaming client sees it;
* tokens generated per second, by all sessions together.

How many sessions a cache keeps is the largest number of them with a hit rate of ``--enough`` or more. Prompts are
random, as weights may be: neither changes what is kept.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from conversations import Talk, account, converse
from machine import describe
from shapes import SHAPES
from subjects import MODES, subject

from oscar_tools.local_server import LocalServer, serve

LONGEST_WAIT = 3600
"""Seconds until a server is idle, at most."""
COLUMNS = ("sessions", "hit_rate", "device_rate", "host_rate", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_s")
_HOST_POOL = re.compile(r"Allocating .*host pool: (\d+) tokens")


def host_tokens(log: str) -> int | None:
    """Tokens that host memory holds, by a server's log; None where the release does not say."""
    found = _HOST_POOL.search(log)
    return int(found[1]) if found else None


def warm_up(server: LocalServer, talk: Talk, vocabulary: int, concurrency: int, device_tokens: int) -> None:
    """Have kernels compiled, those that load from the host too: more sessions than the device keeps, two turns each."""
    sessions = device_tokens // talk.longest + 1
    asyncio.run(converse(server.url, sessions, talk._replace(turns=2), vocabulary, concurrency, seed=1))


def measure(
    server: LocalServer, counts: list[int], talk: Talk, vocabulary: int, concurrency: int, until: float
) -> list[dict[str, Any]]:
    """A row for every number of sessions, each with an empty cache.

    Args:
        server: with a host tier.
        counts: numbers of sessions, in rising order.
        talk: what a session says.
        vocabulary: ids that prompts are made of.
        concurrency: requests at once.
        until: numbers behind the first with a lower hit rate are left out.

    Raises:
        RuntimeError: the server refused a request.
    """
    rows: list[dict[str, Any]] = []
    for count in counts:
        server.flush(LONGEST_WAIT)
        turns, seconds = asyncio.run(converse(server.url, count, talk, vocabulary, concurrency))
        rows.append({"sessions": count} | account(turns, seconds, talk.answer))
        print("  ".join(f"{rows[-1][name]:>12}" for name in COLUMNS), flush=True)
        if rows[-1]["hit_rate"] < until:
            break
    return rows


def kept(rows: list[dict[str, Any]], enough: float) -> int:
    """The largest number of sessions with a hit rate of ``enough`` or more; 0 of none."""
    return max((row["sessions"] for row in rows if row["hit_rate"] >= enough), default=0)


def numbers(text: str) -> list[int]:
    """Positive numbers with commas, in rising order.

    Raises:
        ValueError: one of them is not.
    """
    found = sorted(int(part) for part in text.split(","))
    if found[0] < 1:
        raise ValueError(f"{found[0]} is not a positive number")
    return found


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    sessions: Annotated[str, typer.Option(help="numbers of sessions, with commas")] = "8,16,32,64,96,128",
    turns: Annotated[int, typer.Option(min=2, help="turns of a session")] = 3,
    first: Annotated[int, typer.Option(min=1, help="tokens of its first prompt")] = 4096,
    question: Annotated[int, typer.Option(min=1, help="new tokens of each later prompt")] = 256,
    answer: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 4,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2",
    host_gigabytes: Annotated[
        int, typer.Option(min=0, help="host memory of every server, 10^9 bytes; 0 leaves it to --server-args")
    ] = 10,
    device_tokens: Annotated[int, typer.Option(help="tokens of the pool on the device")] = 32_768,
    enough: Annotated[float, typer.Option(help="hit rate of sessions that count as kept")] = 0.95,
    until: Annotated[float, typer.Option(help="a cache with a lower hit rate is asked for no more sessions")] = 0.0,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/sessions.json"),
) -> None:
    """Measure how many sessions a host memory keeps."""
    counts, talk = numbers(sessions), Talk(turns, first, question, answer)
    if concurrency * talk.longest > device_tokens:
        raise typer.BadParameter(f"{concurrency} sessions of {talk.longest} tokens exceed {device_tokens} tokens")
    load = talk._asdict() | {"concurrency": concurrency}
    limits = {"host_gigabytes": host_gigabytes, "device_tokens": device_tokens, "enough": enough}
    result: dict[str, Any] = describe() | {"shape": model.name if model else shape} | load | limits
    out.parent.mkdir(parents=True, exist_ok=True)
    most: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        what = subject(model, shape, Path(temporary))
        flags = [*what.flags, "--max-total-tokens", str(device_tokens), "--enable-hierarchical-cache"]
        flags += ["--hicache-size", str(host_gigabytes)] if host_gigabytes else []
        for name in modes.split(","):
            given = [*flags, *MODES[name].args, *server_args.split()]
            with serve(
                what.folder, out.with_suffix(f".{name}.log"), given, MODES[name].environment(what.folder)
            ) as server:
                result.setdefault("servers", {})[name] = MODES[name].facts(server)
                result[f"{name}_host_tokens"] = host_tokens(server.text())
                print(f"{name}: room for {result[f'{name}_host_tokens']} tokens on the host", flush=True)
                print("  ".join(f"{column:>12}" for column in COLUMNS), flush=True)
                warm_up(server, talk, what.vocabulary, concurrency, device_tokens)
                result[name] = measure(server, counts, talk, what.vocabulary, concurrency, until)
            most[name] = kept(result[name], enough)
            result["kept"] = most
            out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"sessions at a hit rate of {enough} or more: {most}", flush=True)


if __name__ == "__main__":
    typer.run(main)
