"""Hybrid models with prefill and decode apart: states and windows go over, and answers are those of stock SGLang.

Rows are lossless, and NaN where a window must be read; rings and sink blocks are NaN until they are filled.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support import hybrid_models
from support.compare import LOGPROBS, assert_same
from support.disaggregated import Pair, backend_params, serve_pair
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--skip-tokenizer-init", "--dtype", "float32"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "4", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
INT2 += ["--max-running-requests", "4", "--max-mamba-cache-size", "64", "--mamba-track-interval", "128"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
NEAR_TIE = DRIFT = 0.01
LENGTHS, TOKENS = (1, 20, 64, 70, 300, 640, 900), 24
"""Prompts below, at and above the ends of sink and recent window."""


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[number, *rng.choices(range(250), k=length - 1)] for number, length in enumerate(LENGTHS, 1)]


def ask(server: Server | Pair, workers: int = 1) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), prompts()))


@pytest.fixture(scope="module", params=["qwen3_next", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_models.save(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *STOCK, env=FLOAT) as server:
        return ask(server, 2)


RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


@pytest.mark.parametrize("backend", backend_params())
def test_answers_are_those_of_stock(backend: str, model: Path, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    """One after the other; then four at a time, with chunks, hits on the prefill server, and requests that the decode
    server retracts."""
    env = with_plugins(environment(installed()) | FLOAT | HADAMARD | STRICT, "lossless_plugin", "no_gpu_plugin")
    chunks = ("--chunked-prefill-size", "128")
    with serve_pair(model, tmp_path, *INT2, backend=backend, env=env, prefill=chunks, of_decode=RETRACTING) as pair:
        assert_same(expected, ask(pair), NEAR_TIE, DRIFT)
        again = ask(pair, workers=4)
        assert_same(expected, again, NEAR_TIE, DRIFT)
        assert again[-1]["meta_info"]["cached_tokens"] == 896
        assert refills(pair.decode) > 0
        assert "#retracted_reqs" in pair.decode.text()
        assert pair.prefill.alive()
        assert pair.decode.alive()
