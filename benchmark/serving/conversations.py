"""Conversations of many turns with a server: who asks when, what was asked before, and what came from the prefix cache.

The load is of the kind of SGLang's own ``benchmark/hicache/bench_multiturn.py``: in every turn a session sends all of
its history and a new question, and keeps the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from subjects import asking, chunks_of, connector

TIERS = ("device", "host")
LONGEST_WAIT = 3600


class Talk(NamedTuple):
    """What a session says: turns, and tokens of its first prompt, of every later question, of every answer."""

    turns: int
    first: int
    question: int
    answer: int

    @property
    def longest(self) -> int:
        """Tokens of a session after its last turn."""
        return self.first + (self.turns - 1) * self.question + self.turns * self.answer


@dataclass
class Session:
    """One conversation.

    Args:
        number: other numbers ask other things.
        talk: how much it says.
        vocabulary: ids that it is made of.
    """

    number: int
    talk: Talk
    vocabulary: int
    history: list[int] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        """The history and the question of a turn, counted from 0."""
        rng = random.Random(f"{self.number} {turn}")
        length = self.talk.question if turn else self.talk.first
        return [*self.history, *(rng.randrange(self.vocabulary) for _ in range(length))]


class Reply(NamedTuple):
    """What came of a request: seconds until its first token, its tokens, and cached tokens of its prompt by tier."""

    first_token: float
    tokens: list[int]
    cached: dict[str, int]


class Turn(NamedTuple):
    """A turn that is over. ``possible`` are the tokens of its prompt that were asked or answered in earlier turns."""

    session: int
    turn: int
    possible: int
    reply: Reply


def order(sessions: int, turns: range) -> list[tuple[int, int]]:
    """(session, turn) in the order of asking: all sessions have had a turn before the first has the next."""
    return [(session, turn) for turn in turns for session in range(sessions)]


async def hold(
    ask: Callable[[list[int], int], Awaitable[Reply]], sessions: list[Session], turns: range, concurrency: int
) -> list[Turn]:
    """Have all sessions take their turns, in :func:`order`, ``concurrency`` requests at once.

    A turn waits for the one before it, so that fewer sessions than ``concurrency`` ask fewer at once.

    Args:
        ask: sends a prompt and how many tokens are wanted.
        sessions: numbered from 0; their histories grow.
        turns: which.
        concurrency: requests at once.

    Returns:
        the turns, in the order of their ends.
    """
    waiting = iter(order(len(sessions), turns))
    busy = [asyncio.Lock() for _ in sessions]
    done: list[Turn] = []

    async def worker() -> None:
        for number, turn in waiting:
            async with busy[number]:
                session = sessions[number]
                possible, prompt = len(session.history), session.prompt(turn)
                reply = await ask(prompt, session.talk.answer)
                session.history = prompt + reply.tokens
                done.append(Turn(number, turn, possible, reply))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


def read_stream(chunks: list[bytes], tokens: int) -> tuple[list[int], dict[str, int]]:
    """Tokens and cached prompt tokens by tier of a streamed answer.

    Args:
        chunks: JSON of every event. Their ``output_ids`` are all tokens so far, or with SGLang's
            ``--incremental-streaming-output`` the new ones.
        tokens: that were asked for.

    Raises:
        ValueError: the answer has another number of tokens, or is an error.
    """
    events = [json.loads(chunk) for chunk in chunks]
    if not events or "meta_info" not in events[-1]:
        raise ValueError(f"the server broke off: {events[-1:]}")
    ids = list(events[-1]["output_ids"])
    if len(ids) != tokens:
        ids = [token for event in events for token in event["output_ids"]]
    if len(ids) != tokens:
        raise ValueError(f"{len(ids)} tokens came back, {tokens} were asked for")
    details = events[-1]["meta_info"].get("cached_tokens_details") or {}
    return ids, {tier: details.get(tier) or 0 for tier in TIERS}


def asker(client: aiohttp.ClientSession, url: str) -> Callable[[list[int], int], Awaitable[Reply]]:
    """What asks a server for :func:`hold`, and raises ``RuntimeError`` where it refuses."""

    async def ask(ids: list[int], tokens: int) -> Reply:
        body = json.dumps(asking(ids, tokens) | {"stream": True}).encode()
        chunks: list[bytes] = []
        first = math.nan
        begin = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with client.post(f"{url}/generate", data=body, headers=headers) as reply:
            if reply.status != 200:
                raise RuntimeError(f"HTTP status {reply.status}: {(await reply.text())[:300]}")
            async for chunk in chunks_of(reply):
                first = first if chunks else time.perf_counter() - begin
                chunks.append(chunk)
        return Reply(first, *read_stream(chunks, tokens))

    return ask


async def converse(
    url: str, sessions: int, talk: Talk, vocabulary: int, concurrency: int, seed: int = 0
) -> tuple[list[Turn], float]:
    """Hold conversations with a server.

    The first turns end before the others begin.

    Args:
        url: of the server.
        sessions: how many.
        talk: what each says.
        vocabulary: ids that prompts are made of.
        concurrency: requests at once.
        seed: conversations of other seeds say other things.

    Returns:
        the turns after the first, and the seconds that they took together.

    Raises:
        RuntimeError: the server refused.
        ValueError: it broke off.
    """
    people = [Session(seed * 1_000_000 + number, talk, vocabulary) for number in range(sessions)]
    limit = aiohttp.ClientTimeout(total=LONGEST_WAIT)
    async with aiohttp.ClientSession(connector=connector(), timeout=limit) as client:
        ask = asker(client, url)
        await hold(ask, people, range(1), concurrency)
        begin = time.perf_counter()
        turns = await hold(ask, people, range(1, talk.turns), concurrency)
        return turns, time.perf_counter() - begin


def quantile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else math.nan


def account(turns: list[Turn], seconds: float, answer: int) -> dict[str, Any]:
    """Hit rate, milliseconds to the first token and tokens per second of turns that took ``seconds`` together.

    The hit rate is the share of the tokens of earlier turns that came from the prefix cache, all in all and by tier.
    """
    possible = sum(turn.possible for turn in turns)
    cached = {tier: sum(turn.reply.cached[tier] for turn in turns) for tier in TIERS}
    waits = [1000 * turn.reply.first_token for turn in turns]
    return {
        "turns": len(turns),
        "possible_tokens": possible,
        "hit_rate": round(sum(cached.values()) / max(possible, 1), 4),
        **{f"{tier}_rate": round(tokens / max(possible, 1), 4) for tier, tokens in cached.items()},
        "ttft_p50_ms": round(quantile(waits, 0.5), 1),
        "ttft_p99_ms": round(quantile(waits, 0.99), 1),
        "tokens_per_s": round(answer * len(turns) / seconds, 1),
    }
