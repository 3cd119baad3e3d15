"""FlashAttention-4 as the attention kernel of extend: the one that SGLang brings for Blackwell, compiled when called.

No CUDA toolkit is needed: CUTLASS's Python compiler, which SGLang installs, builds it in seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from sglang_oscar.attention.flash_attention3 import FlashAttention3

PACKAGES = ("cutlass", "quack")
"""What it is compiled with."""
SOURCE = "kernels/ops/attention/flash_attention_v4.py"
"""Where SGLang has it."""


class FlashAttention4(FlashAttention3):
    """As :class:`FlashAttention3`, for Blackwell in data centers and in workstations."""

    capabilities = (10, 12)
    head_dims = ((64, 64), (128, 128), (192, 128))
    needs = "FlashAttention-4 (nvidia-cutlass-dsl and quack-kernels)"
    splitting: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def installed() -> bool:
        """Whether SGLang has it, and what compiles it is there; nothing is imported."""
        spec = importlib.util.find_spec("sglang")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        here = any((Path(folder) / SOURCE).is_file() for folder in folders)
        return here and all(importlib.util.find_spec(name) is not None for name in PACKAGES)

    @staticmethod
    def function() -> Callable[..., Any]:
        """SGLang's."""
        from sglang.kernels.ops.attention.flash_attention_v4 import flash_attn_varlen_func

        function: Callable[..., Any] = flash_attn_varlen_func
        return function
