"""gpt-oss with prefill and decode apart: sliding windows go over as SGLang's, and answers are those of stock SGLang.

Rows of full layers are lossless, and NaN where a window of int2 mode must be read; so are rings, sink blocks and the
pool of layers with a sliding window until they are filled.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import LOGPROBS, assert_same
from support.disaggregated import Pair, backend_params, serve_pair
from support.models import VOCABULARY, save
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head", "--moe-runner-backend", "triton"]
STOCK = ["--attention-backend", "intel_amx", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "4", *COMMON]
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
NEAR_TIE = DRIFT = 0.06
LENGTHS, TOKENS = (1, 20, 64, 90, 96, 300, 640, 900), 24
"""Prompts below, at and above the ends of sink, sliding and recent window."""


def ask(server: Server | Pair, workers: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    asked = [[number, *rng.choices(range(VOCABULARY), k=length - 1)] for number, length in enumerate(LENGTHS, 1)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), asked))


@pytest.mark.parametrize("backend", backend_params())
def test_answers_are_those_of_stock(backend: str, tmp_path: Path) -> None:
    """One after the other; then four at a time, with chunks, hits on the prefill server, and requests that the decode
    server retracts."""
    release, model = environment(installed()), save("gpt_oss", tmp_path / "model")
    env = with_plugins(release | HADAMARD | STRICT, "gpt_oss_plugin", "lossless_plugin")
    chunks = ("--chunked-prefill-size", "128")
    with serve_pair(model, tmp_path, *INT2, backend=backend, env=env, prefill=chunks, of_decode=RETRACTING) as pair:
        alone, together = ask(pair, 1), ask(pair, 4)
        assert together[-1]["meta_info"]["cached_tokens"] >= LENGTHS[-1] - 256 - 64
        assert refills(pair.decode) > 0
        assert "#retracted_reqs" in pair.decode.text()
        assert pair.prefill.alive()
        assert pair.decode.alive()
    with serve(model, tmp_path / "stock", *STOCK, env=with_plugins(release, "gpt_oss_plugin")) as server:
        expected = ask(server, 2)
    assert_same(expected, alone, NEAR_TIE, DRIFT)
    assert_same(expected, together, NEAR_TIE, DRIFT)
