"""Experts of their own on each of two ranks, moved between them while requests run: answers are those of stock SGLang.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import models, ranks
from support.compare import LOGPROBS, assert_same
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, refills, serve
from support.speculation import with_plugins

pytestmark = ranks.MARKS
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
PROMPTS = ranks.prompts((900, 700, 40, 330, 651, 613), seed=19)


def ask(server: Server) -> list[dict]:
    """All at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), PROMPTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.model_of_experts(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What stock SGLang answers on one rank."""
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *ranks.STOCK) as server:
        return ask(server)


@pytest.mark.parametrize("divided", CONFIGURATIONS)
def test_experts_that_move(divided: str, model: Path, expected: list[dict], tmp_path: Path) -> None:
    env = HADAMARD | STRICT | TWO_CORES | {"SGLANG_LOG_EXPERT_LOCATION_METADATA": "1"}
    env = with_plugins(env, "lossless_plugin", "expert_ranks_plugin")
    with serve(model, tmp_path / "log", *ranks.INT2, *TWO_RANKS, *CONFIGURATIONS[divided], env=env) as server:
        cold, warm = ask(server), ask(server)
        assert server.alive()
        text = server.text()
        assert (refills(server) > 0) == (divided == "heads")
    assert_same(expected, cold, NEAR_TIE, DRIFT)
    assert_same(expected, warm, NEAR_TIE, DRIFT)
    assert any(answer["meta_info"]["cached_tokens"] for answer in warm)
    assert re.search(r"changed_physical_slots=[1-9]", text), "no expert has moved"
    assert set(re.findall(r"(TP\d).*\[EPLBManager\] rebalance end", text)) == {"TP0", "TP1"}
