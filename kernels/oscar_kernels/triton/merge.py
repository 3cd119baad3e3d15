"""Merge: one result from the partial results of a split attention, weighted by their log-sum-exp.

Where values are stored multiplied, the result is multiplied by the matrix of its kv head before it is written. A
program then has all channels of ROWS results that share a matrix, of several requests where there are many, so that
matrices are read for many results at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.triton.arith import dot, narrow
from oscar_kernels.triton.plan import plan_pieces

COLUMNS = tl.constexpr(64)
"""Columns of a matrix that are multiplied at a time."""


@triton.jit
def _merge_span(
    o_ptr, lse_ptr, first, end, top, total, out, Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold partials [first, end) [ROWS] of query heads into (top, total [ROWS], out [ROWS, BLOCK_D])."""
    channel = tl.arange(0, BLOCK_D)
    for start in range(0, tl.max(end - first, 0), BLOCK):
        partial = (first[:, None] + start + tl.arange(0, BLOCK)[None, :]).to(tl.int64)
        lse = tl.load(lse_ptr[:, None] + partial * Q_HEADS, mask=partial < end[:, None], other=float("-inf"))
        valid = lse != float("-inf")
        # Rows of empty partials were never written.
        rows = o_ptr[:, None] + partial * (Q_HEADS * D)
        o = tl.load(rows[:, :, None] + channel[None, None, :], mask=valid[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 1))
        safe_top = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight = tl.exp2(lse - safe_top[:, None])
        fade = tl.exp2(top - safe_top)
        total = total * fade + tl.sum(weight, 1)
        out = out * fade[:, None] + tl.sum(o * weight[:, :, None], 1)
        top = new_top
    return top, total, out


@triton.jit(do_not_specialize=["batch", "pieces"])
def merge_kernel(
    o_ptr, lse_ptr, out_ptr, out_stride_token, out_stride_head, out_lse_ptr, terms_ptr, kv_lens_ptr, ring_start_ptr,
    batch, pieces, Q_HEADS: tl.constexpr, D: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    WINDOW_PARTS: tl.constexpr, MIN_TILES: tl.constexpr, BATCH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr, GQA: tl.constexpr, DRAFTS: tl.constexpr,
    QUERIES: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr, SETS: tl.constexpr, TERMS: tl.constexpr,
    R_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS query heads of one of SETS matrices, D / BLOCK_D): weighted means of query heads' partials;
    zeros for an empty request.

    In verification a request is a pass, and Q_HEADS counts every query head for each of the pass's tokens. out_lse
    [tokens, q_heads] takes the log2 of the sum, -inf for an empty request. Results are multiplied by a matrix in TERMS
    terms [SETS, TERMS, D, D]; 0 terms are identity, otherwise BLOCK_D is D.
    """
    HEADS_OF_SET: tl.constexpr = Q_HEADS // SETS
    tiles = tl.cdiv(batch * HEADS_OF_SET, ROWS)
    matrix = tl.program_id(0) // tiles
    vector = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    live = vector < batch * HEADS_OF_SET
    request = vector // HEADS_OF_SET
    head = matrix * HEADS_OF_SET + vector % HEADS_OF_SET
    request_ids, counts = plan_pieces(
        kv_lens_ptr, ring_start_ptr, batch, pieces, SINK, RECENT, BLOCK_N, MIN_TILES, BATCH, PASSES
    )
    # Behind the last request there are no pieces.
    first = tl.sum(tl.where(request_ids[None, :] < request[:, None], counts[None, :], 0), 1)
    end = first + tl.sum(tl.where(request_ids[None, :] == request[:, None], counts[None, :], 0), 1)
    start_d = tl.program_id(1) * BLOCK_D
    o_ptr += head * D + start_d
    lse_ptr += head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top, total, out = _merge_span(o_ptr, lse_ptr, first, end, top, total, out, Q_HEADS, D, BLOCK, BLOCK_D)
    if WINDOW_PARTS > 0:
        first = pieces + batch + request * WINDOW_PARTS
        end = tl.where(live, first + WINDOW_PARTS, first)
        top, total, out = _merge_span(o_ptr, lse_ptr, first, end, top, total, out, Q_HEADS, D, BLOCK, BLOCK_D)
    # Of an empty request the sum is 0, and top -inf.
    log_sum = top + tl.log2(total)
    out = tl.where((total == 0)[:, None], 0.0, out / total[:, None])
    if DRAFTS == 0:
        token, q_head = request.to(tl.int64), head
    else:
        # The last pass works on as many tokens as the others, and leaves alone what they have done.
        begin = request % PASSES * QUERIES
        own = tl.minimum(begin, DRAFTS - QUERIES) + head % (GQA * QUERIES) // GQA
        token = (request // PASSES * DRAFTS + own).to(tl.int64)
        q_head = head // (GQA * QUERIES) * GQA + head % GQA
        live = live & (own >= begin)
    if HAS_LSE:
        tl.store(out_lse_ptr + token * (Q_HEADS // QUERIES) + q_head, log_sum, mask=live & (start_d == 0))
    rows = out_ptr + token * out_stride_token + q_head * out_stride_head
    if TERMS == 0:
        channel = start_d + tl.arange(0, BLOCK_D)
        tl.store(rows[:, None] + channel[None, :], narrow(out, out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        out = narrow(out, terms_ptr.dtype.element_ty)
        row = tl.arange(0, D)
        for first_column in tl.static_range(0, D, COLUMNS):
            column = first_column + tl.arange(0, COLUMNS)
            y = tl.zeros([ROWS, COLUMNS], tl.float32)
            # Small terms first.
            for step in tl.static_range(TERMS):
                at = (matrix * TERMS + TERMS - 1 - step) * (D * D) + row[:, None] * D + column[None, :]
                y = dot(out, tl.load(terms_ptr + at), y)
            y = narrow(y * (1.0 / R_SCALE), out_ptr.dtype.element_ty)
            tl.store(rows[:, None] + column[None, :], y, mask=live[:, None])
