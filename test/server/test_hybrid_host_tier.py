"""States of hybrid models that come back from host memory bring their windows along.

Rows are lossless, and NaN where a window must be read. Rings and sink blocks are NaN until they are filled, and so are
the windows beside a state that comes from the host, as long as nobody has waited for them.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support import hybrid_models
from support.api import from_host, wait_for
from support.compare import LOGPROBS, assert_same
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--skip-tokenizer-init", "--dtype", "float32"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "4", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--mamba-track-interval", "64", *COMMON]
SMALL = ["--max-total-tokens", "2560", "--max-running-requests", "2", "--max-mamba-cache-size", "16"]
"""Tokens of three of the conversations, sink blocks for four, and states for next to none but those that run."""
TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-mem-layout", "page_first"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FROM = "0.5.22"
"""The first release that takes what lies beside states along."""
NEAR_TIE = DRIFT = 0.01
CONVERSATIONS, LENGTH, TOKENS, TURNS = 6, 560, 24, 3
"""A page ends within the first answers."""


@dataclass
class Turn:
    """What a server was asked and answered."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]] = field(default_factory=list)


def ask(server: Server, prompts: list[list[int]], workers: int = 1) -> Turn:
    with ThreadPoolExecutor(workers) as pool:
        return Turn(prompts, list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), prompts)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_models.save("qwen3_next", tmp_path_factory.mktemp("next") / "model")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """Turns of conversations with stock SGLang, which go on from its own answers."""
    rng = random.Random(11)
    prompts = [[number, *rng.choices(range(250), k=LENGTH - 1)] for number in range(1, CONVERSATIONS + 1)]
    turns = []
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *STOCK, env=FLOAT) as server:
        for _ in range(TURNS):
            turns.append(ask(server, prompts, 4))
            prompts = [
                prompt + answer["output_ids"] + rng.choices(range(250), k=rng.randrange(20, 90))
                for prompt, answer in zip(turns[-1].prompts, turns[-1].answers, strict=True)
            ]
    return turns


def variables(version: str) -> dict[str, str]:
    env = environment(version) | FLOAT | HADAMARD | STRICT
    return with_plugins(env, "lossless_plugin", "late_host_plugin", "roomy_host_plugin", "no_gpu_plugin")


CONFIGURATIONS: dict[str, tuple[str, list[str], int, int]] = {
    "one_by_one": (installed(), [], 1, 2),
    "write_back_chunked": (
        installed(),
        ["--hicache-write-policy", "write_back", "--chunked-prefill-size", "128", "--mamba-max-states-per-path", "2"],
        2,
        TURNS,
    ),
    "oldest": (FROM, ["--hicache-io-backend", "direct"], 2, 2),
}
"""By name: release, arguments, requests at once and turns."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hits_on_the_host(name: str, model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """Six conversations, a pool for three, in turn: whatever comes back, each answer is that of stock SGLang."""
    version, args, workers, count = CONFIGURATIONS[name]
    with serve(model, tmp_path / "log", *INT2, *SMALL, *TIER, *args, env=variables(version)) as server:
        turns = []
        for turn in expected[:count]:
            turns.append(ask(server, turn.prompts, workers))
            assert_same(turn.answers, turns[-1].answers, NEAR_TIE, DRIFT)
        for before, turn in itertools.pairwise(turns):
            hits = from_host(turn.answers)
            print("from host", hits)
            lengths = [len(prompt) for prompt in before.prompts]
            long = sum(hit >= length // 64 * 64 for hit, length in zip(hits, lengths, strict=True))
            assert long >= CONVERSATIONS - 1, f"tokens from the host {hits} of {lengths}"
        assert refills(server) == 0
        server.flush()
        wait_for(server.alive, "a server that lives")
        assert_same(expected[0].answers[:2], ask(server, expected[0].prompts[:2]).answers, NEAR_TIE, DRIFT)


def test_a_state_without_its_window_is_seen(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """The check can fail: windows that stay on the host are NaN."""
    env = variables(installed()) | {"LATE_HOST_WINDOWS_STAY": "1"}
    with serve(model, tmp_path / "log", *INT2, *SMALL, *TIER, env=env) as server:
        assert_same(expected[0].answers, ask(server, expected[0].prompts).answers, NEAR_TIE, DRIFT)
        with pytest.raises(requests.HTTPError):
            ask(server, expected[1].prompts)
        assert "the model's output is not a number (NaN)" in server.text()
