"""The decode kernel: which piece of which request a program attends to, and windows of 16-bit tokens.

How many pieces a request gets is worked out on the device by every program from the lengths of the whole batch, so
that pieces are equally long whatever the lengths are, the grid depends on shapes only and no length reaches the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.triton.arith import LOG2_E, dot, exp2, narrow
from oscar_kernels.triton.decode_history import attend_history, load_heads
from oscar_kernels.triton.padding import padded
from oscar_kernels.triton.plan import plan_pieces, split_lengths

LOWEST = tl.constexpr(-1e30)
"""Running maximum of columns that have seen nothing yet, where that may be."""


@triton.jit
def _fold(
    state, q, k_ptr, v_ptr, first_row, rows, head, first, end, new, visible, sm_scale, KV_HEADS: tl.constexpr,
    D: tl.constexpr, V_D: tl.constexpr, BLOCK_N: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Fold a tile of a window, positions [first, end) and no more than BLOCK_N of them, into ``state``.

    FRESH: new tokens of a verification, of which bit j of a column's word in visible [BLOCK_G] says whether it sees
    position new + j.
    """
    top, total, out = state
    channel, v_channel = tl.arange(0, padded(D)), tl.arange(0, V_D)
    position = first + tl.arange(0, BLOCK_N)
    live = position < end
    row = (first_row + position % rows) * KV_HEADS
    k_at = (row * D)[None, :, None] + (head * D)[:, None, None] + channel[None, None, :]
    k_live = live[None, :, None]
    if padded(D) != D:
        k_live = k_live & (channel < D)[None, None, :]
    k = tl.load(k_ptr + k_at, mask=k_live, other=0.0)
    v_at = (row * V_D)[None, None, :] + (head * V_D)[:, None, None] + v_channel[None, :, None]
    logits = dot(k, q, tl.zeros([q.shape[0], BLOCK_N, q.shape[2]], tl.float32)) * (sm_scale * LOG2_E)
    logits = tl.where(live[None, :, None], logits, float("-inf"))
    if FRESH:
        # A value that is no number would spoil the columns that do not see it, too: 0 x NaN is NaN. It is left out of
        # the product, and who sees it is told by the logit.
        v = tl.load(v_ptr + v_at, mask=live[None, None, :], other=0.0)
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        broken = tl.max((finite == 0).to(tl.int32), 1) > 0
        v = tl.where(finite, v, tl.zeros_like(v))
        logits = tl.where(broken[:, :, None], float("nan"), logits)
        seen = ((visible[None, :] >> (position - new).to(tl.int64)[:, None]) & 1) != 0
        logits = tl.where((live[:, None] & seen)[None, :, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    if FRESH:
        # A column may see nothing of a tile.
        new_top = tl.maximum(new_top, LOWEST)
    fade = exp2(top - new_top)
    p = exp2(logits - new_top[:, None, :])
    total = total * fade + tl.sum(p, 1)
    if not FRESH:
        v = tl.load(v_ptr + v_at, mask=live[None, None, :], other=0.0)
    return new_top, total, dot(v, narrow(p, v_ptr.dtype.element_ty), out * fade[:, None, :])


@triton.jit
def _window(
    q_rows, q_mask, k_ptr, v_ptr, first_row, rows, head, begin, end, new, visible, sm_scale, o_rows, lse_ptrs,
    KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Positions [begin, end) of a 16-bit window, position p in row first_row + p % rows; from ``new`` on they are new
    tokens of a verification.
    """
    channel = tl.arange(0, V_D)
    q = narrow(load_heads(q_rows, q_mask, D).to(tl.float32), k_ptr.dtype.element_ty)
    top = tl.full([BLOCK_H, BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_H, V_D, BLOCK_G], tl.float32)
    old_end = tl.minimum(end, new) if DRAFTS > 0 else end
    # Two loop iterations in flight: more would take the shared memory of the history's tiles.
    for first in tl.range(begin, old_end, BLOCK_N, num_stages=2):
        top, total, out = _fold(
            (top, total, out), q, k_ptr, v_ptr, first_row, rows, head, first, old_end, new, visible, sm_scale,
            KV_HEADS, D, V_D, BLOCK_N, False,
        )  # fmt: skip
    if DRAFTS > 0:
        for first in tl.range(tl.maximum(begin, new), end, BLOCK_N, num_stages=1):
            top, total, out = _fold(
                (top, total, out), q, k_ptr, v_ptr, first_row, rows, head, first, end, new, visible, sm_scale,
                KV_HEADS, D, V_D, BLOCK_N, True,
            )  # fmt: skip
    out = out / total[:, None, :]
    tl.store(o_rows[:, None, :] + channel[None, :, None], out, mask=q_mask[:, None, :])
    tl.store(lse_ptrs, top + tl.log2(total), mask=q_mask)


@triton.jit
def first_token(request, DRAFTS: tl.constexpr, QUERIES: tl.constexpr, PASSES: tl.constexpr):
    """Index of a pass's first token among all of the batch, int64. The last pass works on as many as the others."""
    if DRAFTS == 0:
        return request.to(tl.int64)
    else:
        own = tl.minimum(request % PASSES * QUERIES, DRAFTS - QUERIES)
        return (request // PASSES * DRAFTS + own).to(tl.int64)


@triton.jit(do_not_specialize=["batch", "pieces", "page_table_stride"])
def decode_kernel(
    q_ptr, q_stride_token, q_stride_head, visible_ptr, k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr,
    k_sink_ptr, v_sink_ptr, k_ring_ptr, v_ring_ptr, page_table_ptr, page_table_stride, kv_lens_ptr,
    ring_row_ptr, ring_start_ptr, sink_block_ptr, o_ptr, lse_ptr, batch, pieces, sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GQA: tl.constexpr, D: tl.constexpr,
    V_D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_CODING: tl.constexpr, V_CODING: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, SINK_PARTS: tl.constexpr, WINDOW_PARTS: tl.constexpr, PART: tl.constexpr,
    MIN_TILES: tl.constexpr, BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, DRAFTS: tl.constexpr, QUERIES: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads / BLOCK_H, pieces + batch + batch * WINDOW_PARTS): heads of one token are read together.

    o [grid y, q_heads, V_D] float32 and lse [grid y, q_heads] float32 in log2 take the partial results; lse = -inf
    where there was nothing to attend to. In verification ``batch`` counts passes over requests, each for QUERIES
    tokens, and q_heads is that of all of these.
    """
    work = tl.program_id(1)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = head < KV_HEADS
    # A padded head reads what the last one reads, and is never written.
    read_head = tl.minimum(head, KV_HEADS - 1)
    in_group = tl.arange(0, BLOCK_G)
    COLUMNS: tl.constexpr = GQA * QUERIES
    q_mask = head_mask[:, None] & (in_group < COLUMNS)[None, :]
    partial = work.to(tl.int64) * (KV_HEADS * COLUMNS) + head[:, None] * COLUMNS + in_group[None, :]
    o_rows = o_ptr + partial * V_D
    lse_ptrs = lse_ptr + partial
    if DRAFTS == 0:
        q_rows = q_ptr + (head[:, None] * GQA + in_group[None, :]) * q_stride_head
    else:
        q_rows = q_ptr + (head[:, None] * GQA + in_group[None, :] % GQA) * q_stride_head
        q_rows += (in_group // GQA).to(tl.int64)[None, :] * q_stride_token

    history_work = pieces + batch
    if work < history_work:
        request_ids, counts = plan_pieces(
            kv_lens_ptr, ring_start_ptr, batch, pieces, SINK, RECENT, BLOCK_N, MIN_TILES, BATCH, PASSES
        )
        ends = tl.cumsum(counts, 0)
        request = tl.sum((ends <= work).to(tl.int32), 0)
        if request < batch:
            mine = request_ids == request
            count = tl.sum(tl.where(mine, counts, 0), 0)
            piece = work - (tl.sum(tl.where(mine, ends, 0), 0) - count)
            row = request // PASSES
            kv_len = tl.load(kv_lens_ptr + row)
            begin, end = split_lengths(kv_len, tl.load(ring_start_ptr + row), SINK, RECENT)
            first_tile = begin // BLOCK_N
            tiles = (end + BLOCK_N - 1) // BLOCK_N - first_tile
            attend_history(
                q_rows + first_token(request, DRAFTS, QUERIES, PASSES) * q_stride_token, q_mask, k_rows_ptr, v_rows_ptr,
                k_points_ptr, k_factor_ptr, page_table_ptr + row.to(tl.int64) * page_table_stride, read_head,
                first_tile + tiles * piece // count, first_tile + tiles * (piece + 1) // count, begin, end, sm_scale,
                o_rows, lse_ptrs, K_STRIDE, V_STRIDE, KV_HEADS, D, V_D, K_BITS, V_BITS, K_CODING, V_CODING, K_GROUP,
                V_GROUP, SCALE_DTYPE,
                EXACT_DTYPE, PAGE, BLOCK_H, BLOCK_G, BLOCK_N,
            )  # fmt: skip
    elif WINDOW_PARTS > 0:
        request = (work - history_work) // WINDOW_PARTS
        part = (work - history_work) % WINDOW_PARTS
        row = request // PASSES
        kv_len = tl.load(kv_lens_ptr + row)
        sink_end, ring_begin = split_lengths(kv_len, tl.load(ring_start_ptr + row), SINK, RECENT)
        first = first_token(request, DRAFTS, QUERIES, PASSES)
        q_rows += first * q_stride_token
        visible = tl.zeros([BLOCK_G], tl.int64)
        if DRAFTS > 0:
            visible = tl.load(visible_ptr + first + in_group // GQA, mask=in_group < COLUMNS, other=0)
        if part < SINK_PARTS:
            k_ptr, v_ptr, rows = k_sink_ptr, v_sink_ptr, SINK
            first_row = tl.load(sink_block_ptr + row).to(tl.int64) * SINK
            begin = part * PART
            end = tl.minimum(begin + PART, sink_end)
        else:
            k_ptr, v_ptr, rows = k_ring_ptr, v_ring_ptr, RING
            first_row = tl.load(ring_row_ptr + row).to(tl.int64) * RING
            begin = ring_begin + (part - SINK_PARTS) * PART
            end = tl.minimum(begin + PART, kv_len + DRAFTS)
        if begin >= end:
            tl.store(lse_ptrs, tl.full([BLOCK_H, BLOCK_G], float("-inf"), tl.float32), mask=q_mask)
        else:
            _window(
                q_rows, q_mask, k_ptr, v_ptr, first_row, rows, read_head, begin, end, kv_len, visible,
                sm_scale, o_rows, lse_ptrs, KV_HEADS, D, V_D, BLOCK_H, BLOCK_G, BLOCK_W, DRAFTS,
            )  # fmt: skip
