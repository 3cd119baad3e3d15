"""Values of a chunk that are no numbers: taken out before anything attends to the chunk.

Attention kernels give a token that a query does not see, later in its chunk or of the next request in a tile, the
weight 0. But 0 x NaN is NaN, so such a value would spoil whom it does not concern. It becomes 0, and its key NaN: who
sees the token is told by the logit, nobody else is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.triton.padding import channel_mask, padded

VECTORS = 32
"""(token, head) pairs of a program."""


@triton.jit
def finite_or_zero(x):
    """``x`` with 0 for every NaN and infinity."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, tl.zeros_like(x))


@triton.jit(do_not_specialize=["tokens"])
def _finite_kernel(
    k_ptr, k_stride_token, k_stride_head, v_ptr, v_stride_token, v_stride_head, tokens, HEADS: tl.constexpr,
    D: tl.constexpr, V_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK (token, head) pairs). Writes nothing where every value is a number."""
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (vector // HEADS).to(tl.int64), vector % HEADS
    at = (v_ptr + token * v_stride_token + head * v_stride_head)[:, None] + tl.arange(0, V_D)[None, :]
    v = tl.load(at, mask=(vector < tokens * HEADS)[:, None], other=0.0)
    # Of float32: the interpreter does no arithmetic on bfloat16.
    broken = tl.max((tl.abs(v.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1) > 0
    tl.store(at, finite_or_zero(v), mask=broken[:, None])
    # Bits that are a NaN in both formats of 16 bits.
    at = (k_ptr + token * k_stride_token + head * k_stride_head)[:, None] + tl.arange(0, padded(D))[None, :]
    nan = tl.full([BLOCK, padded(D)], 0x7FFF, tl.int16).to(k_ptr.dtype.element_ty, bitcast=True)
    tl.store(at, nan, mask=channel_mask(broken, D))


def make_values_finite_(k: torch.Tensor, v: torch.Tensor) -> None:
    """Zero values that are no numbers, in place, and make the keys of these heads of their tokens NaN.

    Args:
        k, v: [tokens, kv_heads, head_dim of keys or of values], bfloat16 or float16, with contiguous channels and
            any other strides.

    Raises:
        ValueError: shapes or strides are not these.
    """
    if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("keys and values must be alike, with contiguous channels")
    tokens, heads, channels = v.shape
    if tokens:
        _finite_kernel[(triton.cdiv(tokens * heads, VECTORS),)](
            k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), tokens, HEADS=heads, D=k.shape[2],
            V_D=channels, BLOCK=VECTORS, num_warps=4,
        )  # fmt: skip
