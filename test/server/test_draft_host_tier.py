"""Draft models beside a host tier: behind a hit on the host as many drafts are accepted as behind one on the device.

A draft model whose own rows stayed on the host would change no answer, and draft badly. Rows are lossless, and NaN
where a window must be read or as long as nobody has waited for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import draft_models
from support.api import from_host
from support.compare import LOGPROBS, assert_same
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, serve
from support.speculation import INT2, NEAR_TIE, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--skip-tokenizer-init", "--dtype", "float32"]
STOCK += ["--max-mamba-cache-size", "16"]
TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-mem-layout", "page_first"]
SMALL = ["--max-total-tokens", "2560", "--max-running-requests", "2"]
"""Tokens of three of the prompts."""
STATES = ["--mamba-track-interval", "64", "--max-mamba-cache-size", "16"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
CHAIN = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
ASKED, OTHERS, LENGTH, TOKENS = 2, 4, 600, 40


def prompts() -> list[list[int]]:
    rng = random.Random(31)
    return [[number, *rng.choices(range(250), k=LENGTH - 1)] for number in range(1, ASKED + OTHERS + 1)]


def ask(server: Server, of: list[list[int]]) -> list[dict[str, Any]]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in of]


def steps(answers: list[dict[str, Any]]) -> list[int]:
    """Steps of verification of each answer: the fewer, the more drafts were accepted."""
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


def hybrid(folder: Path) -> tuple[Path, list[str]]:
    model = draft_models.hybrid_with_draft_layer("qwen3_next", folder / "hybrid")
    return model, ["--speculative-algorithm", "NEXTN", *CHAIN, *STATES]


def dense(folder: Path) -> tuple[Path, list[str]]:
    model, eagle, _ = draft_models.llama_with_drafts(folder)
    return model, ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(eagle), *CHAIN]


def dense_fp8(folder: Path) -> tuple[Path, list[str]]:
    model, args = dense(folder)
    return model, [*args, *draft_models.FP8_CACHE]


Made = Callable[[Path], tuple[Path, list[str]]]
CONFIGURATIONS: dict[str, tuple[Made, str]] = {
    "hybrid": (hybrid, installed()),
    "dense": (dense, installed()),
    "dense_fp8": (dense_fp8, installed()),
}
"""By name: model and drafts, and release."""


def variables(version: str, **others: str) -> dict[str, str]:
    env = environment(version, **FLOAT, **HADAMARD, **STRICT, **others)
    return with_plugins(
        env, "lossless_plugin", "late_host_plugin", "roomy_host_plugin", "no_gpu_plugin", "fp8_drafts_plugin"
    )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_acceptance_behind_a_hit_on_the_host(name: str, tmp_path: Path) -> None:
    made, version = CONFIGURATIONS[name]
    (model, args), of = made(tmp_path), prompts()
    with serve(model, tmp_path / "stock", *STOCK, env=FLOAT) as server:
        expected = ask(server, of[:ASKED])
    with serve(model, tmp_path / "log", *INT2, *SMALL, *TIER, *args, env=variables(version)) as server:
        ask(server, of[:ASKED])
        device = ask(server, of[:ASKED])
        ask(server, of[ASKED:])
        host = ask(server, of[:ASKED])
        assert from_host(device) == [0] * ASKED
        assert min(from_host(host)) >= (LENGTH - 256) // 64 * 64 - 64, from_host(host)
        assert steps(host) == steps(device)
        assert max(steps(host)) < TOKENS / 1.3
        for answers in (device, host):
            assert_same(expected, answers, NEAR_TIE, NEAR_TIE)
        assert server.alive()


def test_drafts_that_stay_on_the_host_are_seen(tmp_path: Path) -> None:
    """The check can fail: answers are the same and take more steps."""
    (model, args), of = hybrid(tmp_path), prompts()
    env = variables(installed(), LATE_HOST_DRAFTS_STAY="1")
    with serve(model, tmp_path / "log", *INT2, *SMALL, *TIER, *args, env=env) as server:
        ask(server, of[:ASKED])
        device = ask(server, of[:ASKED])
        ask(server, of[ASKED:])
        host = ask(server, of[:ASKED])
        assert min(from_host(host)) > 0
        assert sum(steps(host)) > sum(steps(device))
