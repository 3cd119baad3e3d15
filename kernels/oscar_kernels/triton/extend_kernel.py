"""The extend kernel: which chunk's queries a program has, and everything they see, with one online softmax.

Order matters in one place: history comes first, because its sums are kept in the units of the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.triton.arith import LOG2_E, dot, exp2, narrow, unit_size, unit_start
from oscar_kernels.triton.extend_history import attend_history, load_heads, load_rows
from oscar_kernels.triton.padding import padded
from oscar_kernels.triton.plan import split_lengths


@triton.jit
def _fold(
    state, q, k_rows, v_rows, live, visible, sm_scale, D: tl.constexpr, V_D: tl.constexpr, V_BITS: tl.constexpr,
    V_GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold a tile of 16-bit keys and values at row pointers [BLOCK_N] into ``state``.

    ``live`` [BLOCK_N] says which rows exist, ``visible`` [BLOCK_M, BLOCK_N] who sees them; both only if MASKED.
    """
    top, total, out = state
    channel = tl.arange(0, padded(D))
    k_at = k_rows[None, :] + channel[:, None]
    if padded(D) == D:
        if MASKED:
            k = tl.load(k_at, mask=live[None, :], other=0.0)
        else:
            k = tl.load(k_at)
    else:
        exists = (channel < D)[:, None]
        if MASKED:
            exists = exists & live[None, :]
        k = tl.load(k_at, mask=exists, other=0.0)
    logits = dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32)) * (sm_scale * LOG2_E)
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    fade = exp2(top - new_top)
    p = exp2(logits - new_top[:, None])
    total = total * fade + tl.sum(p, 1)
    p = narrow(p, v_rows.dtype.element_ty)
    new_out = ()
    UNIT: tl.constexpr = unit_size(V_D, V_BITS, V_GROUP)
    for u in tl.static_range(V_D // UNIT):
        if MASKED:
            v = load_rows(v_rows, live, unit_start(u, V_D, V_BITS, V_GROUP), UNIT)
        else:
            v = tl.load(v_rows[:, None] + (unit_start(u, V_D, V_BITS, V_GROUP) + tl.arange(0, UNIT))[None, :])
        new_out = new_out + (dot(p, v, out[u] * fade[:, None]),)
    return new_top, total, new_out


@triton.jit(do_not_specialize=["batch", "page_table_stride"])
def extend_kernel(
    q_ptr, q_stride_token, q_stride_head, q_rot_ptr, q_rot_stride_token, q_rot_stride_head, k_ptr, k_stride_token,
    k_stride_head, v_ptr, v_stride_token, v_stride_head, k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr,
    k_sink_ptr, v_sink_ptr, k_ring_ptr, v_ring_ptr, page_table_ptr, page_table_stride, kv_lens_ptr, ring_row_ptr,
    ring_start_ptr, sink_block_ptr, qo_indptr_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, batch,
    sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GQA: tl.constexpr, D: tl.constexpr,
    V_D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_CODING: tl.constexpr, V_CODING: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_LSE: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TOKENS tokens, at most one short one per request; kv heads)."""
    UNIT: tl.constexpr = unit_size(V_D, V_BITS, V_GROUP)
    UNITS: tl.constexpr = V_D // UNIT
    work = tl.program_id(0)
    head = tl.program_id(1)

    # Which request, which tokens.
    ids = tl.arange(0, BATCH)
    first = tl.load(qo_indptr_ptr + ids, mask=ids < batch, other=0)
    last = tl.load(qo_indptr_ptr + ids + 1, mask=ids < batch, other=0)
    tiles = (last - first + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    request = tl.sum((ends <= work).to(tl.int32), 0)
    if request >= batch:
        return
    # The last tiles of a chunk see most keys: they come first.
    tile = tl.sum(tl.where(ids == request, ends, 0), 0) - 1 - work
    chunk_begin = tl.load(qo_indptr_ptr + request)
    length = tl.load(qo_indptr_ptr + request + 1) - chunk_begin
    row = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + row // GQA
    q_mask = (row < TOKENS * GQA) & (token < length)
    index = (chunk_begin + token).to(tl.int64)
    q_head = head * GQA + row % GQA

    kv_len = tl.load(kv_lens_ptr + request)
    sink_end, ring_begin = split_lengths(kv_len, tl.load(ring_start_ptr + request), SINK, RECENT)
    out = ()
    for u in tl.static_range(UNITS):
        out = out + (tl.zeros([BLOCK_M, UNIT], tl.float32),)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    q_rows = q_rot_ptr + index * q_rot_stride_token + q_head * q_rot_stride_head
    if ring_begin > sink_end:
        top, total, out = attend_history(
            (top, total, out), q_rows, q_mask, k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr,
            page_table_ptr + request.to(tl.int64) * page_table_stride, head, sink_end, ring_begin, sm_scale, K_STRIDE,
            V_STRIDE, KV_HEADS, D, V_D, K_BITS, V_BITS, K_CODING, V_CODING, K_GROUP, V_GROUP, SCALE_DTYPE, EXACT_DTYPE,
            PAGE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    offset = tl.arange(0, BLOCK_N)
    if SINK + RECENT > 0:
        q = narrow(load_heads(q_rows, q_mask, D).to(tl.float32), k_sink_ptr.dtype.element_ty)
        if SINK > 0:
            block = tl.load(sink_block_ptr + request).to(tl.int64) * SINK
            for start in range(0, sink_end, BLOCK_N):
                live = start + offset < sink_end
                at = (block + start + offset) * KV_HEADS + head
                top, total, out = _fold(
                    (top, total, out), q, k_sink_ptr + at * D, v_sink_ptr + at * V_D, live, live[None, :], sm_scale, D,
                    V_D, V_BITS, V_GROUP, True,
                )  # fmt: skip
        if RECENT > 0:
            ring = tl.load(ring_row_ptr + request).to(tl.int64) * RING
            for start in range(ring_begin, kv_len, BLOCK_N):
                live = start + offset < kv_len
                at = (ring + (start + offset) % RING) * KV_HEADS + head
                top, total, out = _fold(
                    (top, total, out), q, k_ring_ptr + at * D, v_ring_ptr + at * V_D, live, live[None, :], sm_scale, D,
                    V_D, V_BITS, V_GROUP, True,
                )  # fmt: skip
    if HAS_CHUNK:
        q = load_heads(q_ptr + index * q_stride_token + q_head * q_stride_head, q_mask, D)
        # Tiles before the first token of this program are seen by all of its rows.
        seen_by_all = tile * TOKENS // BLOCK_N * BLOCK_N
        for start in range(0, seen_by_all, BLOCK_N):
            at = (chunk_begin + start + offset).to(tl.int64)
            top, total, out = _fold(
                (top, total, out), q, k_ptr + at * k_stride_token + head * k_stride_head,
                v_ptr + at * v_stride_token + head * v_stride_head, 0, 0, sm_scale, D, V_D, V_BITS, V_GROUP, False,
            )  # fmt: skip
        for start in range(seen_by_all, tl.minimum((tile + 1) * TOKENS, length), BLOCK_N):
            key = start + offset
            at = (chunk_begin + key).to(tl.int64)
            top, total, out = _fold(
                (top, total, out), q, k_ptr + at * k_stride_token + head * k_stride_head,
                v_ptr + at * v_stride_token + head * v_stride_head, key < length, key[None, :] <= token[:, None],
                sm_scale, D, V_D, V_BITS, V_GROUP, True,
            )  # fmt: skip

    # Nothing to attend to (only without the chunk): zeros, and a log-sum-exp of -inf.
    inverse = tl.where(total == 0, 0.0, 1.0 / total)
    rows = out_ptr + index * out_stride_token + q_head * out_stride_head
    for u in tl.static_range(UNITS):
        channel = unit_start(u, V_D, V_BITS, V_GROUP) + tl.arange(0, UNIT)
        value = narrow(out[u] * inverse[:, None], out_ptr.dtype.element_ty)
        tl.store(rows[:, None] + channel[None, :], value, mask=q_mask[:, None])
    if HAS_LSE:
        tl.store(lse_ptr + index * (KV_HEADS * GQA) + q_head, top + tl.log2(total), mask=q_mask)
