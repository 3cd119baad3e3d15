"""Experts of their own on each of two ranks, moved between them while requests run: answers are those of stock SGLang.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled.
"""

from __future__ import annotations

import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support import models
from support.compare import LOGPROBS, assert_same
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="binds two processes to two cores"),
]
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
# Two experts have copies, and a layer is moved every few passes.
MOVED = ["--ep-size", "2", "--ep-num-redundant-experts", "2", "--ep-dispatch-algorithm", "dynamic", "--enable-eplb"]
MOVED += ["--eplb-rebalance-num-iterations", "12", "--eplb-rebalance-layers-per-chunk", "1"]
MOVED += ["--expert-distribution-recorder-mode", "stat", "--expert-distribution-recorder-buffer-size", "12"]
PLACES = [[3, 2, 1, 0, 3, 2]] * models.COMMON["num_hidden_layers"]
"""Experts of each layer at first: three on a rank."""
PLACED = ["--init-expert-location", json.dumps({"physical_to_logical_map": PLACES})]
ATTENDED_APART = ["--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"]
CONFIGURATIONS = {
    # Two sink blocks for more beginnings: lost ones are computed again, by passes that are recorded, too.
    "heads": [*MOVED, *PLACED, "--eplb-algorithm", "deepseek", "--max-running-requests", "1"],
    # Ranks have requests of their own, and pad their batches to each other's sizes.
    "requests": [*MOVED, *ATTENDED_APART, "--max-running-requests", "4"],
}
"""By what ranks divide among them of attention."""
NEAR_TIE, DRIFT, TOKENS = 0.06, 0.08, 12
LENGTHS = (900, 700, 40, 330, 651, 613)


def prompts() -> list[list[int]]:
    """Prompts that have no first token in common."""
    rng = random.Random(19)
    return [[n, *(rng.randrange(models.VOCABULARY) for _ in range(length - 1))] for n, length in enumerate(LENGTHS, 1)]


def ask(server: Server) -> list[dict]:
    """All at once."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), prompts()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every token goes to all experts: noise in the last bit of a router would choose others.
    return models.save("qwen3_moe", tmp_path_factory.mktemp("moe"), num_experts_per_tok=4)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What stock SGLang answers on one rank."""
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *STOCK) as server:
        return ask(server)


@pytest.mark.parametrize("divided", CONFIGURATIONS)
def test_experts_that_move(divided: str, model: Path, expected: list[dict], tmp_path: Path) -> None:
    env = HADAMARD | STRICT | TWO_CORES | {"SGLANG_LOG_EXPERT_LOCATION_METADATA": "1"}
    env = with_plugins(env, "lossless_plugin", "expert_ranks_plugin")
    with serve(model, tmp_path / "log", *INT2, *TWO_RANKS, *CONFIGURATIONS[divided], env=env) as server:
        cold, warm = ask(server), ask(server)
        assert server.alive()
        text = server.text()
        assert (refills(server) > 0) == (divided == "heads")
    assert_same(expected, cold, NEAR_TIE, DRIFT)
    assert_same(expected, warm, NEAR_TIE, DRIFT)
    assert any(answer["meta_info"]["cached_tokens"] for answer in warm)
    assert re.search(r"changed_physical_slots=[1-9]", text), "no expert has moved"
    assert set(re.findall(r"(TP\d).*\[EPLBManager\] rebalance end", text)) == {"TP0", "TP1"}
