"""What Triton kernels are compiled for: its names for PyTorch's dtypes, and the rows of a cache."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from oscar_kernels.cache import LayerCache
from oscar_kernels.codebook import Codebook
from oscar_kernels.layout import CODEBOOK

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def row_constants(cache: LayerCache) -> dict[str, Any]:
    """Compile-time constants of the rows of both sides.

    Raises:
        ValueError: scales of keys and values, or numbers of 16 bits, have different dtypes.
    """
    key, value = cache.k_layout, cache.v_layout
    return {
        "D": key.head_dim,
        "V_D": value.head_dim,
        "K_BITS": key.bits,
        "V_BITS": value.bits,
        "K_CODING": key.coding,
        "V_CODING": value.coding,
        # A codebook has one scale for a head.
        "K_GROUP": key.head_dim if key.coding == CODEBOOK else key.group_size,
        "V_GROUP": value.group_size,
        "SCALE_DTYPE": TRITON_DTYPES[cache.scale_dtype],
        "EXACT_DTYPE": TRITON_DTYPES[cache.exact_dtype],
    }


def codebook_tensors(
    codebook: Codebook | None, coding: str, stand_in: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, as int32 of four each, and factors; ``stand_in`` for both where the coding has none.

    Raises:
        ValueError: the coding needs a codebook that is not given.
    """
    if coding != CODEBOOK:
        return stand_in, stand_in
    if codebook is None:
        raise ValueError("rows of a codebook need it: the cache and the format must have one")
    return codebook.points.view(torch.int32), codebook.factor
