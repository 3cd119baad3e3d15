"""What Triton kernels are compiled for: its names for PyTorch's dtypes, and the rows of a cache."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from oscar_kernels.cache import LayerCache
from oscar_kernels.layout import AFFINE

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def row_constants(cache: LayerCache) -> dict[str, Any]:
    """Compile-time constants of the rows of both sides.

    Raises:
        ValueError: scales of keys and values, or numbers of 16 bits, have different dtypes; or a coding is not affine.
    """
    key, value = cache.k_layout, cache.v_layout
    if other := {key.coding, value.coding} - {AFFINE}:
        raise ValueError(f"the Triton kernels do not support coding {' and '.join(sorted(other))}")
    return {
        "K_BITS": key.bits,
        "V_BITS": value.bits,
        "K_GROUP": key.group_size,
        "V_GROUP": value.group_size,
        "SCALE_DTYPE": TRITON_DTYPES[cache.scale_dtype],
        "EXACT_DTYPE": TRITON_DTYPES[cache.exact_dtype],
    }
