"""What tests of two ranks on a CPU share: where they run, flags of their servers, a model and prompts."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from support.models import VOCABULARY, save

MARKS = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="binds two processes to two cores"),
]
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]


def prompts(lengths: Sequence[int], seed: int, first: int = 1, least: int = 0) -> list[list[int]]:
    """Prompts that have no first token in common.

    Args:
        lengths: tokens of each.
        seed: of the tokens behind the first.
        first: the first token of the first prompt, that of the next is the next.
        least: the smallest token behind it.
    """
    rng = random.Random(seed)
    return [
        [number, *(rng.randrange(least, VOCABULARY) for _ in range(length - 1))]
        for number, length in enumerate(lengths, first)
    ]


def model_of_experts(folder: Path) -> Path:
    """A random model in ``folder``. Every token goes to all experts: noise in the last bit of a router would choose
    others.
    """
    return save("qwen3_moe", folder, num_experts_per_tok=4)
