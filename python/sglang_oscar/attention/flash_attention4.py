"""FlashAttention-4 as the attention kernel of extend: the one that SGLang brings for Blackwell, compiled when called.

No CUDA toolkit is needed: CUTLASS's Python compiler, which SGLang installs, builds it in seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_oscar.attention.flash_attention3 import FlashAttention3

CAPABILITIES = (10, 12)
"""Major compute capabilities that it is taken on: Blackwell in data centers and in workstations."""
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
"""Of keys and values."""
PACKAGES = ("cutlass", "quack")
"""What it is compiled with."""
SOURCE = "kernels/ops/attention/flash_attention_v4.py"
"""Where SGLang has it."""


def installed() -> bool:
    """Whether SGLang has it, and what compiles it is there; nothing is imported."""
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    here = any((Path(folder) / SOURCE).is_file() for folder in folders)
    return here and all(importlib.util.find_spec(name) is not None for name in PACKAGES)


def missing(head_dim: int, value_head_dim: int | None = None) -> str | None:
    """Why it cannot be had; None where it can.

    Args:
        head_dim: channels of a head.
        value_head_dim: of the values; None where keys have as many.
    """
    heads = (head_dim, head_dim if value_head_dim is None else value_head_dim)
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in CAPABILITIES:
        return "it is for Blackwell GPUs"
    if not installed():
        return "FlashAttention-4 (nvidia-cutlass-dsl and quack-kernels) is not installed"
    if heads not in HEAD_DIMS:
        return f"it is not known to work with head_dim {' and '.join(map(str, dict.fromkeys(heads)))}"
    return None


class FlashAttention4(FlashAttention3):
    """As :class:`FlashAttention3`."""

    @staticmethod
    def function() -> Callable[..., Any]:
        """SGLang's."""
        from sglang.kernels.ops.attention.flash_attention_v4 import flash_attn_varlen_func

        function: Callable[..., Any] = flash_attn_varlen_func
        return function
