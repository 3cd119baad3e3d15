"""How fast users go on generating while long prompts arrive: tokens per second of each, by cache and by flags.

    python benchmark/serving/bench_arrivals.py --shape qwen3-8b:9 --server-args "--mem-fraction-static 0.22"
    python benchmark/serving/bench_arrivals.py --ways plain,mixed --modes int2,fa3_fp8

Users stream answers behind prompts of their own. After a while all arrivals are sent at once, each of its own tokens,
and ask for short answers. What counts is from then until the last of them has its first token: tokens per second of
a user, the longest wait between two of a user's tokens, and how fast prompts are computed meanwhile. ``mixed`` servers
put users' tokens beside chunks of prompts (``--enable-mixed-chunk``); ``plain`` ones compute prompts first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from machine import describe
from shapes import SHAPES
from subjects import MODES, Subject, asking, chunks_of, connector, subject

from oscar_tools.local_server import serve

WAYS = {"plain": [], "mixed": ["--enable-mixed-chunk"]}


@dataclass
class Answer:
    """A streamed answer: ``(seconds on the monotonic clock, tokens so far)`` of every piece."""

    pieces: list[tuple[float, int]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Tokens per second between two times, and the longest wait for a piece, in seconds."""
        before = max((tokens for at, tokens in self.pieces if at <= begin), default=0)
        inside = [(at, tokens) for at, tokens in self.pieces if begin < at <= end]
        last = inside[-1][1] if inside else before
        times = [begin, *(at for at, _ in inside), end]
        wait = max(later - earlier for earlier, later in itertools.pairwise(times))
        return {"tokens_per_s": (last - before) / (end - begin), "longest_wait_s": wait}


async def stream(session: aiohttp.ClientSession, url: str, body: bytes, answer: Answer) -> None:
    """Ask, and note when tokens come.

    Raises:
        aiohttp.ClientResponseError, RuntimeError: the server refused.
    """
    async with session.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as reply:
        reply.raise_for_status()
        async for chunk in chunks_of(reply):
            piece = json.loads(chunk)
            if "error" in piece:
                raise RuntimeError(piece["error"]["message"])
            answer.pieces.append((time.monotonic(), piece["meta_info"]["completion_tokens"]))


async def wait_for_first(answers: list[Answer], tasks: list[asyncio.Task[None]]) -> None:
    """Until each has a token; an error of a request that ends before is raised."""
    while not all(answer.pieces for answer in answers):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


async def measure(
    url: str, what: Subject, users: int, context: int, arrivals: int, length: int, tokens: int, alone: float
) -> dict[str, Any]:
    """Users alone for ``alone`` seconds, then while ``arrivals`` prompts of ``length`` tokens are computed."""
    limit = aiohttp.ClientTimeout(total=3600)
    positions = json.loads((what.folder / "config.json").read_text())["max_position_embeddings"]
    endless = positions - context - 10  # a user's request is ended when the arrivals have their first tokens

    def bodies(first: int, count: int, size: int, wanted: int) -> list[bytes]:
        asked = (asking(what.prompt(seed, size), wanted) for seed in range(first, first + count))
        return [json.dumps(body | {"stream": True}).encode() for body in asked]

    # Made before anything is timed: of long prompts it takes seconds, in which no token would be seen.
    of_users, of_arrivals = bodies(0, users, context, endless), bodies(users, arrivals, length, tokens)
    async with aiohttp.ClientSession(connector=connector(), timeout=limit) as session:

        def send(asked: list[bytes]) -> tuple[list[Answer], list[asyncio.Task[None]]]:
            answers = [Answer() for _ in asked]
            pairs = zip(asked, answers, strict=True)
            return answers, [asyncio.create_task(stream(session, url, body, answer)) for body, answer in pairs]

        generating, running = send(of_users)
        await wait_for_first(generating, running)
        calm = time.monotonic()
        await asyncio.sleep(alone)
        begin = time.monotonic()
        coming, sent = send(of_arrivals)
        await wait_for_first(coming, sent + running)
        firsts = sorted(answer.pieces[0][0] - begin for answer in coming)
        end = begin + firsts[-1]
        for task in running:
            task.cancel()
        await asyncio.gather(*sent, *running, return_exceptions=True)
    meanwhile = [answer.between(begin, end) for answer in generating]
    return {
        "alone_tokens_per_s": round(statistics.mean(x.between(calm, begin)["tokens_per_s"] for x in generating), 2),
        "meanwhile_tokens_per_s": round(statistics.mean(x["tokens_per_s"] for x in meanwhile), 2),
        "longest_wait_s": round(max(x["longest_wait_s"] for x in meanwhile), 2),
        "first_token_s": {"median": round(statistics.median(firsts), 2), "last": round(firsts[-1], 2)},
        "prompt_tokens_per_s": round(arrivals * length / firsts[-1]),
    }


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b:9",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    users: Annotated[int, typer.Option(min=1, help="users who are generating")] = 4,
    context: Annotated[int, typer.Option(min=1, help="tokens of their prompts")] = 8192,
    arrivals: Annotated[int, typer.Option(min=1, help="prompts that arrive")] = 32,
    length: Annotated[int, typer.Option(min=1, help="tokens of each")] = 100_000,
    tokens: Annotated[int, typer.Option(min=1, help="tokens that each asks for")] = 64,
    alone: Annotated[float, typer.Option(min=0.1, help="seconds that users have for themselves first")] = 3,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "int2,fa3_fp8,fa3",
    ways: Annotated[str, typer.Option(help=f"of {', '.join(WAYS)}, with commas")] = "plain,mixed",
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/arrivals.json"),
) -> None:
    """Measure."""
    result: dict[str, Any] = describe() | {
        "shape": shape, "users": users, "context": context, "arrivals": arrivals, "length": length, "rows": [],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        what = subject(model, shape, Path(folder))
        for name in modes.split(","):
            for way in ways.split(","):
                args = [*what.flags, *MODES[name].args, *WAYS[way], *shlex.split(server_args)]
                log = out.with_suffix(f".{name}.{way}.log")
                with serve(what.folder, log, args, MODES[name].environment(what.folder)) as server:
                    facts = MODES[name].facts(server)
                    # Kernels are compiled.
                    asyncio.run(measure(server.url, what, users, 100, 1, min(length, 20_000), 2, 0.1))
                    server.flush()
                    found = asyncio.run(measure(server.url, what, users, context, arrivals, length, tokens, alone))
                row = {"mode": name, "way": way} | found
                print(row, flush=True)
                result["rows"].append(row | {"server": facts})
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
