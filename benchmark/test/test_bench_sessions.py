"""Conversations of many turns: who asks when, what could have been cached, and what was."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from bench_sessions import host_tokens, kept, numbers
from conversations import Reply, Session, Talk, Turn, account, hold, order, quantile, read_stream

TALK = Talk(turns=3, first=10, question=4, answer=2)


def talk(sessions: int, concurrency: int) -> tuple[list[Turn], list[tuple[int, ...]], list[Session], int]:
    """Turns, prompts in the order of asking, sessions and the most requests at once, with a server that answers 7."""
    people = [Session(number, TALK, vocabulary=100) for number in range(sessions)]
    prompts: list[tuple[int, ...]] = []
    running = most = 0

    async def ask(ids: list[int], tokens: int) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        prompts.append(tuple(ids))
        await asyncio.sleep(0)
        running -= 1
        return Reply(0.1, [7] * tokens, {"device": 0, "host": 0})

    turns = asyncio.run(hold(ask, people, range(TALK.turns), concurrency))
    return turns, prompts, people, most


def test_order_is_round_robin() -> None:
    assert order(3, range(1, 3)) == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(("sessions", "concurrency"), [(5, 1), (5, 3), (2, 4)])
def test_prompts_are_histories_and_questions(sessions: int, concurrency: int) -> None:
    """A turn begins with the earlier turns of its session, whose tokens are those that could have been cached."""
    turns, prompts, people, most = talk(sessions, concurrency)
    assert most == min(sessions, concurrency)
    assert [turn.turn for turn in turns] == sorted(turn.turn for turn in turns)
    assert [turn.possible for turn in turns] == [(0, 12, 18)[turn.turn] for turn in turns]
    assert [len(prompt) for prompt in prompts] == [10] * sessions + [16] * sessions + [22] * sessions
    for number, person in enumerate(people):
        mine = [prompt for prompt in prompts if prompt[:10] == tuple(person.history[:10])]
        assert len(mine) == TALK.turns, f"session {number} begins like another"
        for before, after in itertools.pairwise(mine):
            assert after[: len(before) + TALK.answer] == (*before, 7, 7)
        assert len(person.history) == TALK.longest


def test_account() -> None:
    """Hit rates are of what was possible, not of whole prompts."""
    turns = [
        Turn(0, 1, 100, Reply(0.010, [], {"device": 0, "host": 90})),
        Turn(1, 1, 300, Reply(0.030, [], {"device": 30, "host": 0})),
    ]
    row = account(turns, seconds=2.0, answer=8)
    assert (row["hit_rate"], row["device_rate"], row["host_rate"]) == (0.3, 0.075, 0.225)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"], row["tokens_per_s"]) == (10.0, 30.0, 8.0)


def test_quantile() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([], 0.5) != quantile([], 0.5)


def test_sessions_that_are_kept() -> None:
    rows = [{"sessions": count, "hit_rate": rate} for count, rate in ((8, 1.0), (16, 0.95), (32, 0.4))]
    assert kept(rows, 0.95) == 16
    assert kept(rows[2:], 0.95) == 0


def test_streams() -> None:
    """Events with all tokens so far and events with new ones say the same; an error or an early end is told."""

    def event(ids: list[int], **meta: object) -> bytes:
        return json.dumps({"output_ids": ids, "meta_info": meta}).encode()

    details = {"device": 3, "host": 5}
    for events in ([[1], [1, 2], [1, 2, 3]], [[1], [2], [3]]):
        chunks = [event(ids, cached_tokens_details=details) for ids in events]
        assert read_stream(chunks, 3) == ([1, 2, 3], details)
    assert read_stream([event([4], cached_tokens_details=None)], 1) == ([4], {"device": 0, "host": 0})
    for broken in ([], [b'{"error": {"message": "no"}}'], [event([1])]):
        with pytest.raises(ValueError, match=r"broke off|1 tokens came back"):
            read_stream(broken, 3)


def test_arguments_and_log() -> None:
    assert numbers("16,8") == [8, 16]
    with pytest.raises(ValueError, match="not a positive"):
        numbers("0,8")
    line = "Allocating kv hierarchical KV host pool: 54253 tokens, 8.00 GB host memory."
    assert host_tokens(f"a\n[2026-01-01] {line}\nb") == 54253
    assert host_tokens("nothing") is None
