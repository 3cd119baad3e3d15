"""Log probabilities of a prompt, from every edge on: as stock SGLang gives them, cold and behind a prefix hit.

Rows are lossless, and NaN where a window must be read. The rest is float32, so only what windows
round moves log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support.reference import MODEL, document, token_ids
from support.servers import HADAMARD, STRICT, Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
SINK, PAGE, RECENT, CHUNK, LENGTH = 64, 64, 256, 192, 520
COMMON = ["--skip-tokenizer-init", "--dtype", "float32", "--chunked-prefill-size", str(CHUNK)]
COMMON += ["--max-running-requests", "4"]
STOCK, INT2 = ["--attention-backend", "torch_native", *COMMON], ["--kv-cache-dtype", "int2", *COMMON]
HIT = (LENGTH - RECENT) // PAGE * PAGE
EDGES = [-1, 0, 1, SINK // 2, SINK - 1, SINK, SINK + 1, 2 * PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 220]
EDGES += [HIT - 1, HIT, HIT + 1, LENGTH - RECENT, 400, 7 * PAGE - 1, 7 * PAGE, LENGTH - 1, LENGTH]
SHARED = 150
"""Tokens that prompts of other endings share: their hits end there, wherever log probabilities begin."""
BEHIND = [PAGE, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, SHARED - 1, SHARED, SHARED + 1, 400, LENGTH]
ENDS = {"cold": (0, 0), "cached": (LENGTH - 1, HIT), "in_part": (SHARED, 2 * PAGE)}
"""Where hits end, if log probabilities begin behind that: stock's, int2 mode's."""
CHOSEN = "input_top_logprobs", "output_top_logprobs", "output_token_logprobs"
FARTHEST, USUAL = 0.6, 0.02
"""Of log probabilities, the largest distance and the mean: windows are BF16; unlikely tokens move by up to 0.3."""
Asked = list[tuple[list[int], int]]
"""Prompts, and from where on log probabilities are asked for; -1: of no token of the prompt."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Stock SGLang and int2 mode; they start at once."""
    folder = tmp_path_factory.mktemp("edges")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(stack.enter_context, serve(MODEL, folder / "stock", *STOCK)),
            pool.submit(stack.enter_context, serve(MODEL, folder / "int2", *INT2, env=LOSSLESS | HADAMARD | STRICT)),
        ]
        yield begun[0].result(), begun[1].result()


def text(seed: int) -> list[int]:
    return token_ids(document(LENGTH + 100, seed).text)


def at_edges() -> Asked:
    """Each prompt begins with a token of its own."""
    return [([100 + n, *text(n % 3)][:LENGTH], start) for n, start in enumerate(EDGES)]


def other_endings() -> Asked:
    """What the first prompt begins with, and then something else."""
    begin = at_edges()[0][0][:SHARED]
    return [([*begin, 200 + n, *text(4)][:LENGTH], start) for n, start in enumerate(BEHIND)]


def ask(server: Server, asked: Asked, tokens: int) -> list[dict[str, Any]]:
    """What a server says of them, four at a time."""
    more = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 2000, 6]}
    with ThreadPoolExecutor(4) as pool:
        said = pool.map(lambda of: server.generate(of[0], tokens, logprob_start_len=of[1], **more), asked)
        return [answer["meta_info"] for answer in said]


def by_id(entry: Any) -> dict[int, Any]:
    """Log probabilities of a position: of its token, of several, or none."""
    if entry is None:
        return {}
    return {token: logprob for logprob, token, _ in (entry if isinstance(entry[0], list) else [entry])}


def distances(name: str, expected: list[Any], got: list[Any]) -> list[float]:
    """Of log probabilities, where positions and ids are the same; of two chosen ids as likely, either."""
    away: list[float] = []
    assert len(got) == len(expected)
    for right, found in zip(map(by_id, expected), map(by_id, got), strict=True):
        if name not in CHOSEN:
            assert list(found) == list(right)
        assert len(found) == len(right)
        if not right or None in right.values():
            assert found == right, "nothing is said of the first"
            continue
        assert None not in found.values(), "NaN"
        last, other = min(right.values()), min(found.values())
        away += [abs(right.get(token, last) - found.get(token, other)) for token in right | found]
    return away


@pytest.mark.parametrize("turn", ENDS)
def test_edges(turn: str, servers: tuple[Server, Server]) -> None:
    asked, tokens = other_endings() if turn == "in_part" else at_edges(), 0 if turn == "cached" else 1
    expected, got = (ask(server, asked, tokens) for server in servers)
    away = []
    for right, found in zip(expected, got, strict=True):
        names = {name for name in right if name.endswith("_logprobs")}
        assert names >= {f"input_{of}_logprobs" for of in ("token", "top", "token_ids")}
        for name in names:
            away += distances(name, right[name], found[name])
    assert max(away) < FARTHEST
    assert sum(away) / len(away) < USUAL
    cached = [(x["cached_tokens"], y["cached_tokens"]) for x, y in zip(expected, got, strict=True)]
    starts, (stock, int2) = [LENGTH if start < 0 else start for _, start in asked], ENDS[turn]
    assert cached == [(min(stock, start), min(int2, start // PAGE * PAGE)) for start in starts]


def test_behind_the_prompt(servers: tuple[Server, Server]) -> None:
    """Both say the same."""
    body: dict[str, Any] = {"input_ids": [5] * 10, "return_logprob": True, "logprob_start_len": 11}
    stock, int2 = (requests.post(f"{server.url}/generate", json=body, timeout=600) for server in servers)
    assert (int2.status_code, int2.text) == (stock.status_code, stock.text)
    assert int2.status_code == 400
