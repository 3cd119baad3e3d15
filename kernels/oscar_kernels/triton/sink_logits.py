"""Sink logits (:mod:`oscar_kernels.sink_logits`) on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import check_lse
from oscar_kernels.triton.arith import narrow
from oscar_kernels.triton.padding import channel_mask, padded

VECTORS = 16
"""(token, head) pairs of a program."""


@triton.jit(do_not_specialize=["tokens"])
def _sinks_kernel(
    out_ptr, out_stride_token, out_stride_head, lse_ptr, sinks_ptr, q_ptr, q_stride_token, q_stride_head, center_ptr,
    tokens, sm_scale, HEADS: tl.constexpr, GQA: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr,
    HAS_CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK (token, head) pairs)."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = vector < tokens * HEADS
    token, head = vector // HEADS, vector % HEADS
    logits = tl.load(lse_ptr + vector, mask=mask, other=0.0) * 0.6931471805599453
    logits -= tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32)
    if HAS_CENTER:
        channel, exists = tl.arange(0, padded(D)), channel_mask(mask, D)
        rows = q_ptr + token * q_stride_token + head * q_stride_head
        q = tl.load(rows[:, None] + channel[None, :], mask=exists, other=0.0).to(tl.float32)
        center = tl.load(center_ptr + (head // GQA)[:, None] * D + channel[None, :], mask=exists, other=0.0)
        logits += tl.sum(q * center, 1) * sm_scale
    rows = out_ptr + token * out_stride_token + head * out_stride_head
    at = rows[:, None] + tl.arange(0, V_D)[None, :]
    kept = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32) * tl.sigmoid(logits)[:, None]
    tl.store(at, narrow(kept, out_ptr.dtype.element_ty), mask=mask[:, None])


def scale_by_sinks_(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    q: torch.Tensor,
    center: torch.Tensor | None,
    sm_scale: float,
) -> torch.Tensor:
    """:func:`oscar_kernels.sink_logits.scale_by_sinks` in place.

    Args:
        out: [tokens, q_heads, head_dim of the values] with contiguous channels.
        lse: float32 [tokens, q_heads], contiguous.
        sinks: [q_heads], contiguous.
        q, sm_scale: as there.
        center: float32 [kv_heads, head_dim], contiguous; None for nothing.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes, dtypes or strides are not these.
    """
    tokens, heads, channels = out.shape
    check_lse(lse, tokens, heads)
    if q.shape[:2] != out.shape[:2] or q.stride(2) != 1 or out.stride(2) != 1 or sinks.shape != (heads,):
        raise ValueError(f"queries and outputs must have as many heads and contiguous channels, and sinks [{heads}]")
    if center is not None and not (center.is_contiguous() and center.dtype == torch.float32):
        raise ValueError("center must be contiguous float32")
    if tokens:
        gqa = 1 if center is None else heads // len(center)
        _sinks_kernel[(triton.cdiv(tokens * heads, VECTORS),)](
            out, out.stride(0), out.stride(1), lse, sinks, q, q.stride(0), q.stride(1),
            lse if center is None else center, tokens, sm_scale, HEADS=heads, GQA=gqa,
            D=q.shape[2], V_D=channels, HAS_CENTER=center is not None, BLOCK=VECTORS, num_warps=4,
        )  # fmt: skip
    return out
