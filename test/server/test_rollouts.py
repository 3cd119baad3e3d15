"""Rollouts of a trainer: buckets of weights, generation that is paused meanwhile, log probabilities at every edge.

Rows are exact, so that stock SGLang's answers are the right ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file

from support.api import loads, wait_for
from support.models import VOCABULARY
from support.servers import EXACT, STRICT, Server, refills, serve
from support.weights import post, send

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are handed over in host memory"),
]
ARGS = ["--kv-cache-dtype", "int2", "--skip-tokenizer-init", "--enable-fp32-lm-head", "--load-format", "dummy"]
ARGS += ["--chunked-prefill-size", "256", "--max-running-requests", "2"]
DRIFT = 0.06
"""Log probabilities of chunks of other sizes differ by so much in BF16."""
SINK, PAGE, RECENT, LENGTH = 64, 64, 256, 900
HIT = (LENGTH - RECENT) // PAGE * PAGE


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def weights(qwen3: Path) -> list[tuple[str, torch.Tensor]]:
    return sorted(load_file(qwen3 / "model.safetensors").items())


@pytest.fixture(scope="module")
def server(
    qwen3: Path, weights: list[tuple[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One that began with random weights and got the model's in buckets: wrong first, twice, in overlapping parts."""
    with serve(qwen3, tmp_path_factory.mktemp("rollouts") / "log", *ARGS, env=EXACT | STRICT, warm_up=True) as started:
        started.generate(prompt(0), 4)
        third = len(weights) // 3
        wrong = [(name, x.flip(0)) for name, x in weights[: 2 * third]]
        parts = wrong, weights[third:], weights[: 2 * third], weights[third : third + 2]
        send(started, *parts, flush=False, weight_version="first")
        yield started
        assert started.alive()
        assert "Traceback" not in started.text()


def checksums(server: Server) -> Any:
    """Of every tensor, as a trainer asks for them."""
    return [rank["checksums"] for rank in post(server, "weights_checker", action="checksum")["ranks"]]


def scored(server: Server, ids: list[int], start: int) -> list[float]:
    """Log probabilities of the tokens from ``start`` on, computed anew."""
    reply = server.generate(ids, 1, return_logprob=True, logprob_start_len=start - 1)
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][1:]


def assert_near(got: list[float], expected: list[float]) -> None:
    assert len(got) == len(expected)
    assert max((abs(x - y) for x, y in zip(got, expected, strict=True)), default=0) < DRIFT


def test_buckets(server: Server, stock_qwen3: Server, weights: list[tuple[str, torch.Tensor]]) -> None:
    """The last of every tensor counts; the cache is flushed by who is asked to, and only then."""
    assert checksums(server) == checksums(stock_qwen3)
    assert server.generate(prompt(0), 4)["meta_info"]["cached_tokens"] == HIT, "as stock, if nobody asks for a flush"
    send(server, weights[:3], flush=True)
    again = server.generate(prompt(0), 8, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["weight_version"] == "first"
    said = [entry[0] for entry in again["meta_info"]["output_token_logprobs"]]
    assert_near(said, scored(stock_qwen3, prompt(0) + again["output_ids"], LENGTH))


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_weights_that_come_while_it_generates(
    mode: str, server: Server, stock_qwen3: Server, weights: list[tuple[str, torch.Tensor]]
) -> None:
    """The same weights, so that stock's log probabilities are right on both sides of the pause."""
    ids = prompt(len(mode))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, ids, 400, return_logprob=True)
        wait_for(lambda: loads(server)[1] > LENGTH + 2 * PAGE, "some tokens are generated")
        requests.post(f"{server.url}/pause_generation", json={"mode": mode}, timeout=600).raise_for_status()
        send(server, weights[:4], weights[4:], flush=mode != "in_place", weight_version=mode)
        if mode == "in_place":
            assert requests.post(f"{server.url}/flush_cache", timeout=600).status_code == 400
        assert running.done() is (mode == "abort")
        requests.post(f"{server.url}/continue_generation", json={}, timeout=600).raise_for_status()
        answer = running.result()
    info = answer["meta_info"]
    assert info["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert 20 < info["completion_tokens"] <= 400
    assert (info["completion_tokens"] < 400) is (mode == "abort")
    said = [entry[0] for entry in info["output_token_logprobs"]]
    assert_near(said, scored(stock_qwen3, ids + answer["output_ids"], LENGTH))
    assert checksums(server) == checksums(stock_qwen3)
    assert server.generate(ids, 1)["meta_info"]["weight_version"] == mode


EDGES = [-1, 0, 1, SINK - 1, SINK, SINK + 1, 255, 256, 257, HIT - 1, HIT, HIT + 1, LENGTH - RECENT, LENGTH - 1, LENGTH]
FIELDS = "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"


def test_log_probabilities_at_the_edges_of_a_hit(server: Server, stock_qwen3: Server) -> None:
    """From which token on they are asked for: in the sink, at chunks, before, at and behind the hit, at the end.

    A hit ends where they begin. Two requests run at once, so that sinks are given away and computed again.
    """
    ids, cached = prompt(99), []
    server.generate(ids, 1)
    for start in EDGES:
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        asked |= {"token_ids_logprob": [5, 6]}
        others = [threading.Thread(target=server.generate, args=(prompt(1000 * start + n), 1)) for n in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        expected, got = (one.generate(ids, 2, **asked)["meta_info"] for one in (stock_qwen3, server))
        cached.append(got["cached_tokens"])
        for field in FIELDS:
            assert shape(got[field]) == shape(expected[field]), (start, field)
        for field in (*FIELDS, "output_token_logprobs"):
            assert_near(numbers(got[field]), numbers(expected[field]))
    starts = [LENGTH if start < 0 else start for start in EDGES]
    assert cached == [min(HIT, start // PAGE * PAGE) for start in starts]
    assert refills(server) > 0


def shape(found: Any) -> Any:
    """Lists, and in the place of numbers whether there is one."""
    return [shape(one) for one in found] if isinstance(found, list | tuple) else found is None


def numbers(found: Any) -> list[float]:
    """Every log probability, in order."""
    if isinstance(found, list | tuple):
        return [one for part in found for one in numbers(part)]
    return [found] if isinstance(found, float) else []
