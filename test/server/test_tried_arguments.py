"""Arguments of SGLang that int2 mode neither refuses nor knows, off their defaults: answers are those of stock SGLang.

Rows are exact and NaN wherever the BF16 windows must be read; those of attach/known_arguments.py that are called tried
for no other test are here.
"""

from __future__ import annotations

import random
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support.api import retracted
from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY
from support.servers import HADAMARD, RETRACTED, STRICT, Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
NEAR_TIE = DRIFT = 0.06
CONVERSATIONS, TURNS, TOKENS = 6, 3, 24

SCHEDULING = shlex.split(
    "--schedule-policy lof --schedule-conservativeness 0.3 --retraction-policy priority --enable-priority-scheduling "
    "--radix-eviction-policy lfu --prefill-max-requests 2 --num-continuous-decode-steps 3 --stream-interval 4 "
    "--scheduler-recv-interval 2 --max-queued-requests 64 --max-prefill-tokens 2048"
)
CONFIGURATIONS = {
    # Too few tokens for all conversations: what no session refers to goes first.
    "sessions": (["--enable-session-radix-cache", "--max-total-tokens", "4096"], {}, 2),
    "scheduling": ([*SCHEDULING, "--max-running-requests", "4"], RETRACTED, 6),
}
"""By name: arguments, environment and requests at once."""


def converse(server: Server, workers: int, sessions: bool) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and answers of conversations that go on from the answers; with sessions, half of which end early."""
    rng = random.Random(11)
    prompts = [rng.choices(range(VOCABULARY), k=rng.randrange(200, 900)) for _ in range(CONVERSATIONS)]
    names = [f"s{number}" for number in range(CONVERSATIONS)]
    for name in names if sessions else []:
        body = {"capacity_of_str_len": 0, "session_id": name}
        requests.post(f"{server.url}/open_session", json=body, timeout=300).raise_for_status()
    asked: list[tuple[list[int], dict[str, Any]]] = []
    for turn in range(TURNS):
        extra = [{"session_id": name} if sessions else {} for name in names]
        with ThreadPoolExecutor(workers) as pool:
            answers = list(pool.map(lambda ids, more: server.generate(ids, TOKENS, **LOGPROBS, **more), prompts, extra))
        asked += zip(prompts, answers, strict=True)
        prompts = [
            ids + answer["output_ids"] + rng.choices(range(VOCABULARY), k=90)
            for ids, answer in zip(prompts, answers, strict=True)
        ]
        for name in names[::2] if sessions and turn == 1 else []:
            requests.post(f"{server.url}/close_session", json={"session_id": name}, timeout=300).raise_for_status()
    return asked


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_answers_are_those_of_stock_sglang(name: str, qwen3: Path, stock_qwen3: Server, tmp_path: Path) -> None:
    args, env, workers = CONFIGURATIONS[name]
    with serve(qwen3, tmp_path / "log", *INT2, *args, env=LOSSLESS | HADAMARD | STRICT | env) as server:
        asked = converse(server, workers, sessions=name == "sessions")
        assert (retracted(server) > 0) == ("SGLANG_TEST_RETRACT" in env)
        assert max(answer["meta_info"]["cached_tokens"] for _, answer in asked) > 0
        assert server.alive()
    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda one: stock_qwen3.generate(one[0], TOKENS, **LOGPROBS), asked))
    assert_same(expected, [answer for _, answer in asked], NEAR_TIE, DRIFT)
