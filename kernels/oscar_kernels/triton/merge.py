"""Merge: one result from the partial results of a split attention, weighted by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.triton.arith import narrow
from oscar_kernels.triton.plan import plan_pieces


@triton.jit
def _merge_span(
    o_ptr, lse_ptr, first, end, top, total, out, Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold partials [first, end) of one query head into (top, total, out)."""
    channel = tl.arange(0, BLOCK_D)
    for start in range(first, end, BLOCK):
        partial = (start + tl.arange(0, BLOCK)).to(tl.int64)
        lse = tl.load(lse_ptr + partial * Q_HEADS, mask=partial < end, other=float("-inf"))
        valid = lse != float("-inf")
        # Rows of empty partials were never written.
        o = tl.load(o_ptr + partial[:, None] * (Q_HEADS * D) + channel[None, :], mask=valid[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe_top = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight = tl.exp2(lse - safe_top)
        fade = tl.exp2(top - safe_top)
        total = total * fade + tl.sum(weight, 0)
        out = out * fade + tl.sum(o * weight[:, None], 0)
        top = new_top
    return top, total, out


@triton.jit(do_not_specialize=["batch", "pieces"])
def merge_kernel(
    o_ptr, lse_ptr, out_ptr, out_stride_token, out_stride_head, out_lse_ptr, kv_lens_ptr, ring_start_ptr, batch, pieces,
    Q_HEADS: tl.constexpr, D: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, WINDOW_PARTS: tl.constexpr,
    MIN_TILES: tl.constexpr, BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr, GQA: tl.constexpr, DRAFTS: tl.constexpr, QUERIES: tl.constexpr,
    PASSES: tl.constexpr,
):  # fmt: skip
    """Grid (batch, q_heads, D / BLOCK_D): weighted mean of a query head's partials; zeros for an empty request.

    In verification a request is a pass, and Q_HEADS counts every query head for each of the pass's tokens. out_lse
    [batch, q_heads] takes the log2 of the sum, -inf for an empty request.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    request_ids, counts = plan_pieces(
        kv_lens_ptr, ring_start_ptr, batch, pieces, SINK, RECENT, BLOCK_N, MIN_TILES, BATCH, PASSES
    )
    first = tl.sum(tl.where(request_ids < request, counts, 0), 0)
    end = first + tl.sum(tl.where(request_ids == request, counts, 0), 0)
    start_d = tl.program_id(2) * BLOCK_D
    o_ptr += head * D + start_d
    lse_ptr += head
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    top, total, out = _merge_span(o_ptr, lse_ptr, first, end, top, total, out, Q_HEADS, D, BLOCK, BLOCK_D)
    if WINDOW_PARTS > 0:
        first = pieces + batch + request * WINDOW_PARTS
        top, total, out = _merge_span(
            o_ptr, lse_ptr, first, first + WINDOW_PARTS, top, total, out, Q_HEADS, D, BLOCK, BLOCK_D
        )
    if HAS_LSE:
        # Of an empty request the sum is 0, and top -inf.
        tl.store(out_lse_ptr + request * Q_HEADS + head, top + tl.log2(total), mask=start_d == 0)
    out = tl.where(total == 0, 0.0, out / total)
    channel = start_d + tl.arange(0, BLOCK_D)
    if DRAFTS == 0:
        rows = out_ptr + request.to(tl.int64) * out_stride_token + head * out_stride_head
        tl.store(rows + channel, narrow(out, out_ptr.dtype.element_ty))
    else:
        # The last pass works on as many tokens as the others, and leaves alone what they have done.
        begin = request % PASSES * QUERIES
        own = tl.minimum(begin, DRAFTS - QUERIES) + head % (GQA * QUERIES) // GQA
        token = (request // PASSES * DRAFTS + own).to(tl.int64)
        q_head = head // (GQA * QUERIES) * GQA + head % GQA
        rows = out_ptr + token * out_stride_token + q_head * out_stride_head
        tl.store(rows + channel, narrow(out, out_ptr.dtype.element_ty), mask=own >= begin)
