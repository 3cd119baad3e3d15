"""Prefill on one GPU, decode on another, through Mooncake over TCP and nixl: answers are those of one server.

Rows of 16 bits are exact, so that answers are those of stock SGLang, and a page, ring or sink that did not arrive shows
in log probabilities; sink blocks are NaN until somebody fills them, and so is what padded graphs read. Rows of two bits
are compared with those of a single int2 server. On one GPU both servers share it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support import models
from support.compare import LOGPROBS, assert_same, first_difference, largest_drift
from support.disaggregated import Pair, backend_params, serve_pair
from support.fleet import checked
from support.servers import EXACT, HADAMARD, STRICT, Server, refills, serve
from support.together import Together

INT2 = ("--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--enable-cache-report")
STOCK = ("--attention-backend", "triton", "--page-size", "64")
COMMON: tuple[str, ...] = (
    "--enable-fp32-lm-head",
    "--dtype",
    "bfloat16",
    "--skip-tokenizer-init",
    "--max-running-requests",
    "8",
)
# Pools are small; the fraction is of what the GPU has free while the other servers are on it, too.
COMMON += ("--mem-fraction-static", "0.85", "--max-total-tokens", "24576", "--decode-log-interval", "1")
CHUNKS = ("--chunked-prefill-size", "256")
WATCHED = checked("nan", "sinks") | STRICT
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
EXACT_DRIFT = 0.15
"""In nats, as in test_exact_rows.py."""
CODES_DRIFT = 0.66
"""What one rounding to BF16 does to log probabilities behind rows of two bits (test_servers.py)."""
LENGTHS = [1, 20, 63, 64, 70, 255, 300, 640, 900, 1300, 2500]
"""Prompts below, at and above the ends of sink and recent window."""
TOKENS, MANY = 40, 330
"""Of short answers, and of answers longer than the recent window."""
BESIDE = 6
"""Requests at a time."""


def prompts() -> list[list[int]]:
    """Prompts that have no first token in common."""
    rng = random.Random(3)
    return [
        [number, *(rng.randrange(models.VOCABULARY) for _ in range(length - 1))]
        for number, length in enumerate(LENGTHS, 1)
    ]


def ask(server: Server | Pair, workers: int, tokens: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), prompts()))


def compare(name: str, wanted: list[dict[str, Any]], got: list[dict[str, Any]], allowed: float) -> None:
    """Assert agreement, and print how far it goes."""
    found = enumerate(map(first_difference, wanted, got))
    parted = {LENGTHS[number]: (part.index, round(part.gap, 3)) for number, part in found if part}
    print(f"{name}: drift {max(map(largest_drift, wanted, got)):.4f}, part (token, gap): {parted}", flush=True)
    # Noise parts long answers early: a few at a time, so that no part of all tokens has to agree.
    few = len(wanted) if len(wanted[0]["output_ids"]) == TOKENS else 6
    for begin in range(0, len(wanted), few):
        assert_same(wanted[begin : begin + few], got[begin : begin + few], allowed, allowed)


@pytest.fixture(scope="module", params=backend_params())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[dict]]]:
    """What single servers answer, by tokens of an answer: stock SGLang, and int2 mode with two bits."""
    folder = tmp_path_factory.mktemp("single")
    starts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "stock": partial(serve, model, folder / "stock", *STOCK, *COMMON),
        "int2": partial(serve, model, folder / "int2", *INT2, *COMMON, *CHUNKS, env=HADAMARD | STRICT),
    }
    with Together(starts) as servers:
        return {name: {tokens: ask(servers[name], 1, tokens) for tokens in (TOKENS, MANY)} for name in starts}


@pytest.fixture(scope="module")
def pairs(model: Path, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """Pairs of servers whose rows are exact, or of two bits, or that retract requests."""
    folder = tmp_path_factory.mktemp(backend)
    # Each side has a GPU of its own where there are two.
    decode = ("--base-gpu-id", str(min(1, torch.cuda.device_count() - 1)))

    def start(name: str, env: dict[str, str], of_decode: dict[str, str]) -> AbstractContextManager[Any]:
        own = folder / name
        own.mkdir()
        return serve_pair(
            model, own, *INT2, *COMMON, backend=backend, env=env, prefill=CHUNKS, decode=decode, of_decode=of_decode
        )

    starts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "exact": partial(start, "exact", EXACT | WATCHED, {}),
        "two_bits": partial(start, "two_bits", HADAMARD | WATCHED, {}),
        "retracting": partial(start, "retracting", EXACT | STRICT, RETRACTING),
    }
    with Together(starts) as servers:
        yield servers


def healthy(pair: Any) -> None:
    """Nothing broke, and requests were decoded through graphs."""
    for server in (pair.prefill, pair.decode):
        assert server.alive()
        assert "Traceback" not in server.text()
    assert re.search(r"Decode batch.*cuda graph: True", pair.decode.text())


def test_exact_rows_answer_as_stock(pairs: Together, backend: str, single: dict) -> None:
    """One after the other, then many at a time with chunked prompts and hits on the prefill server."""
    pair: Any = pairs["exact"]
    wanted = single["stock"]
    compare(f"{backend}, exact", wanted[TOKENS], ask(pair, 1, TOKENS), EXACT_DRIFT)
    again = ask(pair, BESIDE, TOKENS)
    compare(f"{backend}, exact, at once", wanted[TOKENS], again, EXACT_DRIFT)
    assert again[-1]["meta_info"]["cached_tokens"] >= LENGTHS[-1] - 256 - 64
    compare(f"{backend}, exact, long answers", wanted[MANY], ask(pair, BESIDE, MANY), EXACT_DRIFT)
    assert refills(pair.decode) > 0
    healthy(pair)


def test_two_bits_answer_as_one_server(pairs: Together, backend: str, single: dict) -> None:
    pair: Any = pairs["two_bits"]
    wanted = single["int2"]
    compare(f"{backend}, two bits", wanted[TOKENS], ask(pair, 1, TOKENS), CODES_DRIFT)
    compare(f"{backend}, two bits, long answers", wanted[MANY], ask(pair, BESIDE, MANY), CODES_DRIFT)
    healthy(pair)


def test_retracted_requests_go_on(pairs: Together, backend: str, single: dict) -> None:
    """Rows and recent windows come back from the host, while other requests are decoded."""
    pair: Any = pairs["retracting"]
    compare(f"{backend}, retracting", single["stock"][TOKENS], ask(pair, BESIDE, TOKENS), EXACT_DRIFT)
    assert "#retracted_reqs" in pair.decode.text()
    healthy(pair)
