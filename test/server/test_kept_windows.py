"""Conversations and prompts again behind kept windows: stock's answers, and hardly a token is computed again.

Rows are lossless, and NaN where a window must be read; the ring of a request is NaN when it gains its seat.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support.compare import LOGPROBS, assert_follows, assert_same
from support.models import VOCABULARY
from support.servers import HADAMARD, STRICT, Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
PLUGIN = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
KEPT = HADAMARD | STRICT | PLUGIN | {"SGLANG_OSCAR_KEPT_WINDOWS": "24"}
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--skip-tokenizer-init"]
INT2 += ["--enable-fp32-lm-head", "--max-running-requests", "4"]
NEAR_TIE = DRIFT = 0.06
TOKENS, PAGE, RECENT = 30, 64, 256


def ask(server: Server, asked: list[list[int]], workers: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), asked))


def opening() -> list[list[int]]:
    """Prompts shorter and longer than a window; two part within one behind a common beginning, one is asked twice."""
    rng = random.Random(8)
    alone = [rng.choices(range(VOCABULARY), k=length) for length in (50, 200, 330, 640, 1000)]
    return [*alone, alone[3][:500] + rng.choices(range(VOCABULARY), k=100), alone[4]]


def converse(server: Server, workers: int) -> list[tuple[list[list[int]], list[dict[str, Any]]]]:
    """The opening twice, then two turns that go on from its answers."""
    rng, turns, prompts = random.Random(9), [], opening()
    for turn in range(4):
        answers = ask(server, prompts, workers)
        turns.append((prompts, answers))
        if turn > 0:
            news = [rng.choices(range(VOCABULARY), k=rng.randrange(3, 90)) for _ in prompts]
            prompts = [p + a["output_ids"] + new for p, a, new in zip(prompts, answers, news, strict=True)]
    return turns


@pytest.mark.parametrize(
    ("args", "workers"), [([], 1), (["--chunked-prefill-size", "128"], 4)], ids=["one_by_one", "chunked_at_once"]
)
def test_answers_are_those_of_stock(
    args: list[str], workers: int, qwen3: Path, stock_qwen3: Server, tmp_path: Path
) -> None:
    with serve(qwen3, tmp_path / "log", *INT2, *args, env=KEPT) as server:
        turns = converse(server, workers)
        server.flush()
        again = ask(server, opening(), workers)
        assert server.alive()
    for prompts, answers in turns:
        assert_follows(stock_qwen3, prompts, answers, NEAR_TIE, DRIFT)
    assert_same(turns[0][1], again, NEAR_TIE, DRIFT)
    for prompts, answers in turns[1:]:
        computed = [len(p) - a["meta_info"]["cached_tokens"] for p, a in zip(prompts, answers, strict=True)]
        print("computed", computed)
        if workers == 1:
            # What is new, what an answer's last token leaves, and the rest of a page.
            assert max(computed) <= 90 + 1 + TOKENS + PAGE < RECENT


def test_a_window_that_does_not_come_is_seen(qwen3: Path, tmp_path: Path) -> None:
    """The poison works: what is not brought is NaN."""
    env = KEPT | {"LOSSLESS_ROWS_BRING_NO_WINDOW": "1"}
    with serve(qwen3, tmp_path / "log", *INT2, env=env) as server:
        ask(server, opening()[3:4], workers=1)
        with pytest.raises(requests.HTTPError):
            ask(server, opening()[3:4], workers=1)
