"""What tests of served speculation share: requests of all lengths, asked many at a time."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.compare import LOGPROBS
from support.models import VOCABULARY
from support.servers import Server

NEAR_TIE = DRIFT = 0.06
TOKENS, HALF = 40, 24
"""Tokens of an answer, and of those that a later prompt has of it."""
# In float32 a model's arithmetic does not depend on how many tokens it computes at once.
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--skip-tokenizer-init", "--dtype", "float32"]
SMALL = {"SGLANG_MIXED_KV_PREFIX_TOKENS": "16", "SGLANG_MIXED_KV_RECENT_TOKENS": "24"}
"""With eight new tokens the ring has not a row more than it needs."""


def oracle(tokens: int) -> list[str]:
    """Arguments of the drafts that ``oracle_plugin`` plans, for so many new tokens a step."""
    args = ["--speculative-algorithm", "ORACLE", "--speculative-num-draft-tokens", str(tokens)]
    return [*args, "--speculative-ngram-max-trie-depth", "100000"]


def plugins(*names: str) -> dict[str, str]:
    """Variables that load test plugins of this folder."""
    return {"PYTHONPATH": os.pathsep.join(str(Path(__file__).parent / name) for name in names)}


def with_plugins(env: dict[str, str], *names: str) -> dict[str, str]:
    """Variables that load test plugins beside what is on PYTHONPATH already."""
    path = [plugins(*names)["PYTHONPATH"], env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def prompts() -> list[list[int]]:
    """From one token to some hundreds, some with a beginning in common."""
    rng = random.Random(5)
    shared = [rng.randrange(VOCABULARY) for _ in range(320)]
    lengths = [1, 7, 12, 15, 33, 63, 70, 200, 430, 700]
    made = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    return [*made, shared + made[3], shared + made[5]]


def ask(server: Server, texts: list[list[int]], workers: int, tokens: int = TOKENS, **extra: Any) -> list[dict]:
    """Answers to all texts, ``workers`` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS, **extra), texts))


def behind(answer: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What is known of an answer's tokens behind the first ``tokens``."""
    names = ("output_token_logprobs", "output_top_logprobs")
    meta = {name: answer["meta_info"][name][tokens:] for name in names}
    return dict(answer, output_ids=answer["output_ids"][tokens:], meta_info=meta)


def per_step(answers: list[dict]) -> float:
    """Tokens that a step of verification produced, on average."""
    return sum(len(one["output_ids"]) for one in answers) / sum(one["meta_info"]["spec_verify_ct"] for one in answers)
