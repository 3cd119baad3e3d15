"""gpt-oss behind int2 servers: answers are those of stock SGLang, and every turn of a conversation hits the cache.

Rows of full layers are lossless, and NaN where a window of int2 mode must be read; a sink block is NaN until it is
filled, and so is the pool of layers with a sliding window. Log probabilities are compared: tokens hide wrong sinks.
"""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.api import retracted
from support.compare import LOGPROBS, assert_follows
from support.models import VOCABULARY, save
from support.releases import environment, installed, served
from support.servers import HADAMARD, STRICT, Server, refills, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
SUPPORT = Path(__file__).parents[1] / "support"
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head", "--moe-runner-backend", "triton"]
"""The last two words keep SGLang from weights that are laid out for kernels of a GPU."""
STOCK = ["--attention-backend", "intel_amx", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "2", *COMMON]
NEAR_TIE = DRIFT = 0.06
TOKENS, ANSWER, MESSAGE, RECENT, PAGE = 12, 110, 20, 256, 64
"""Tokens of answers and of messages of a conversation. An answer is longer than the sliding window of 96 tokens, and a
message shorter than the recent window: a hit then ends within the last answer."""


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def prompts() -> list[list[int]]:
    """Shorter than the sliding window, up to many times that, with beginnings of their own."""
    return [tokens(length, seed) for seed, length in enumerate([40, 90, 200, 330, 420, 500, 610, 800])]


def answer_of(server: Server, ids: list[int], tokens: int) -> dict[str, Any]:
    """An answer with a log probability of every token. With overlap scheduling SGLang 0.5.17 itself loses one of some
    requests that it retracts: those are asked again."""
    for _ in range(4):
        answer = server.generate(ids, tokens, **LOGPROBS)
        if [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]:
            return answer
    raise AssertionError(f"log probabilities are missing: {answer}")


def ask(server: Server, asked: list[list[int]], workers: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: answer_of(server, ids, TOKENS), asked))


def turns(server: Server, answer: int = ANSWER) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Three turns of a conversation: prompts and answers."""
    asked, answers = [tokens(700, 50)], []
    for turn in range(3):
        answers.append(answer_of(server, asked[-1], answer))
        asked.append([*asked[-1], *answers[-1]["output_ids"], *tokens(MESSAGE, 60 + turn)])
    return asked[:-1], answers


def plugins(release: dict[str, str], *names: str) -> dict[str, str]:
    paths = [str(SUPPORT / name) for name in names]
    return release | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [release.get("PYTHONPATH")])])}


CONFIGURATIONS: dict[str, tuple[str, list[str], int, dict[str, str]]] = {
    "chunked_mixed": (installed(), ["--chunked-prefill-size", "128", "--enable-mixed-chunk"], 3, {}),
    "retracted_oldest_release": (served()[0], [], 3, {"SGLANG_TEST_RETRACT": "1"}),
}
"""By name: release, arguments, requests at once, further variables."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_answers_are_those_of_stock(name: str, tmp_path: Path) -> None:
    """Prompts, the same again, which hit, with fewer sink blocks than beginnings; then a conversation."""
    version, args, workers, variables = CONFIGURATIONS[name]
    release, model = environment(version), save("gpt_oss", tmp_path / "model")
    env = plugins(release, "gpt_oss_plugin", "lossless_plugin") | HADAMARD | STRICT | variables
    with serve(model, tmp_path / "log", *INT2, *args, env=env) as server:
        first, again = ask(server, prompts(), workers), ask(server, prompts(), workers)
        said, answers = turns(server)
        hits = [answer["meta_info"]["cached_tokens"] for answer in (again[-1], *answers[1:])]
        # All but the recent window of a prompt, in whole pages, whatever the answer before.
        for prompt, hit in zip([prompts()[-1], *said[1:]], hits, strict=True):
            assert hit >= len(prompt) - RECENT - PAGE, (len(prompt), hit)
        assert refills(server) > 0
        assert (retracted(server) > 0) == ("SGLANG_TEST_RETRACT" in env)
        account = re.search(r"int2 memory: window layers: 2 in (\w+), (\d+) bytes a token", server.text())
        assert account is not None
        assert account.groups() == ("bfloat16", str(2 * 2 * 2 * 64 * 2))
        assert server.alive()
    with serve(model, tmp_path / "stock", *STOCK, env=plugins(release, "gpt_oss_plugin")) as server:
        for asked, given in ((prompts(), first), (prompts(), again), (said, answers)):
            assert_follows(server, asked, given, NEAR_TIE, DRIFT)


def test_hits_within_long_answers(tmp_path: Path) -> None:
    """Answers so long that SGLang would free the sliding window in front of where the next turn's hit ends."""
    recent, model = 128, save("gpt_oss", tmp_path / "model")
    sizes = {"SGLANG_MIXED_KV_RECENT_TOKENS": str(recent), "SGLANG_SWA_EVICTION_INTERVAL": "1"}
    env = plugins({}, "gpt_oss_plugin", "lossless_plugin") | HADAMARD | STRICT | sizes
    with serve(model, tmp_path / "log", *INT2, env=env) as server:
        said, answers = turns(server, 250)
        for prompt, answer in zip(said[1:], answers[1:], strict=True):
            hit = answer["meta_info"]["cached_tokens"]
            assert hit >= len(prompt) - recent - PAGE, (len(prompt), hit)
