"""Prefix hits whose sink block is gone: the block is computed again, and the answer is that of stock SGLang.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled. Log probabilities are
compared, because tokens alone do not show a wrong sink.
"""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch

from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY
from support.servers import HADAMARD, STRICT, Server, refills, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
FEW_BLOCKS = ["--max-running-requests", "2"]
"""Four blocks that can be had: fewer than there are beginnings."""
NEAR_TIE = DRIFT = 0.06
TOKENS = 12


def conversations(count: int, length: int, seed: int = 11) -> list[list[int]]:
    """Prompts that have no first token in common."""
    rng = random.Random(seed)
    return [[number, *(rng.randrange(VOCABULARY) for _ in range(length - 1))] for number in range(1, count + 1)]


def ask(server: Server, prompts: list[list[int]], workers: int = 1, tokens: int = TOKENS) -> list[dict]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), prompts))


@pytest.fixture(scope="module")
def expected(stock_qwen3: Server) -> list[dict]:
    """What stock SGLang answers to seven conversations."""
    return ask(stock_qwen3, conversations(7, 900), workers=2)


METRICS = ["--enable-metrics", "--extra-metric-labels", '{"site": "here"}']
CONFIGURATIONS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "beside_others_chunked_mixed_retracted": (
        ["--chunked-prefill-size", "128", "--enable-mixed-chunk"],
        {"SGLANG_TEST_RETRACT": "1"},
        4,
    ),
    "no_overlap_no_recompute_large_pages_small_sinks_metrics": (
        ["--disable-overlap-schedule", "--page-size", "128", *METRICS],
        {"SGLANG_OSCAR_RECOMPUTE_RECENT": "0", "SGLANG_MIXED_KV_PREFIX_TOKENS": "16"},
        2,
    ),
}


PUBLISHED = (
    "num_running_reqs",
    "oscar_sink_refills_total",
    "oscar_damaged_pages_total",
    "oscar_nan_pages_total",
    "oscar_bits_per_element",
    "oscar_cache_info",
)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_conversation_hits(name: str, qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Seven conversations, four blocks, asked twice in turn: seven hits, each answer that of stock SGLang."""
    args, env, workers = CONFIGURATIONS[name]
    prompts = conversations(7, 900)
    with serve(qwen3, tmp_path / "log", *INT2, *FEW_BLOCKS, *args, env=LOSSLESS | HADAMARD | STRICT | env) as server:
        assert_same(expected, ask(server, prompts, workers), NEAR_TIE, DRIFT)
        before = refills(server)
        again = ask(server, prompts, workers)
        assert_same(expected, again, NEAR_TIE, DRIFT)
        cached = [answer["meta_info"]["cached_tokens"] for answer in again]
        assert min(cached) >= 512, f"cached tokens {cached}"
        assert refills(server) > before
        if "--enable-metrics" in args:
            text = requests.get(f"{server.url}/metrics", timeout=600).text
            found = {name: re.search(rf"^sglang:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE) for name in PUBLISHED}
            assert None not in found.values(), found
            labels = {name: dict(re.findall(r'(\w+)="([^"]*)"', match[1])) for name, match in found.items() if match}
            stock = labels.pop("num_running_reqs")
            assert stock["site"] == "here"
            assert all(stock.items() <= of.items() for of in labels.values())
            (facts,) = [
                state["oscar"]
                for state in requests.get(f"{server.url}/server_info", timeout=600).json()["internal_states"]
            ]
            assert labels["oscar_cache_info"]["fingerprint"] == facts["fingerprint"]
            assert labels["oscar_cache_info"]["recipe"] == facts["recipe"] == "hadamard"
            counted = found["oscar_sink_refills_total"]
            assert counted is not None
            assert float(counted[2]) == refills(server)
        assert server.alive()


def test_many_conversations_hit(qwen3: Path, tmp_path: Path) -> None:
    """As many beginnings as a pool holds, many times the blocks: all of them hit, also several in one batch."""
    env = LOSSLESS | HADAMARD | STRICT
    env |= {"SGLANG_MIXED_KV_PREFIX_TOKENS": "16", "SGLANG_MIXED_KV_RECENT_TOKENS": "16"}
    prompts = conversations(120, 100)
    args = [*INT2, "--max-running-requests", "8", "--page-size", "16"]
    with serve(qwen3, tmp_path / "log", *args, env=env) as server:
        first = ask(server, prompts, workers=12, tokens=2)
        again = ask(server, prompts, workers=12, tokens=2)
        assert all(answer["meta_info"]["cached_tokens"] >= 64 for answer in again)
        assert_same(first, again, NEAR_TIE, DRIFT)
        assert refills(server) > 60
