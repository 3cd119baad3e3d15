"""Extend: causal attention of new chunks, exact within a chunk, over the cache before it.

A program owns a tile of query rows of one kv head (neighbouring tokens times the query heads that share the kv head)
and walks once over everything they see with one online softmax: the cached history, whose codes it unpacks as the
decode kernel does, the sinks, the recent ring, and the chunk itself. Nothing is dequantized to memory, so memory
does not grow with the prefix. Which request and which tokens a program works on follows from ``qo_indptr`` on the
device; the grid depends on shapes only.

Order matters in one place: history comes first, because its sums are kept in the units of the codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, LayerCache, check_lse
from oscar_kernels.triton.arith import (
    CODES_PER_UNIT,
    EXACT,
    LOG2_E,
    code_bytes,
    dot,
    exact_channels,
    exp2,
    load_codes,
    load_params,
    log2,
    narrow,
    plane_count,
    reciprocal,
    unit_group,
    unit_size,
    unit_start,
    unit_weight,
)
from oscar_kernels.triton.decode_history import Q_PEAK, Q_UNSCALE
from oscar_kernels.triton.dtypes import row_constants
from oscar_kernels.triton.plan import split_lengths

STAGES = 2
"""Tiles of keys in flight, the one worked on included."""


@triton.jit
def _load_rows(rows, mask, start, SIZE: tl.constexpr):
    """[rows, SIZE] from channel ``start`` on; 0 where masked."""
    return tl.load(rows[:, None] + (start + tl.arange(0, SIZE))[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _history(
    state, q_rows, q_mask, k_rows_ptr, v_rows_ptr, pages_ptr, head, begin, end, sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold history positions [begin, end) into ``state``, which must be fresh; see decode for the arithmetic."""
    K_UNIT: tl.constexpr = unit_size(D, K_BITS, K_GROUP)
    V_UNIT: tl.constexpr = unit_size(D, V_BITS, V_GROUP)
    K_UNITS: tl.constexpr = D // K_UNIT
    V_UNITS: tl.constexpr = D // V_UNIT
    K_GROUPS: tl.constexpr = D // K_GROUP
    V_GROUPS: tl.constexpr = D // V_GROUP
    K_CODE_BYTES: tl.constexpr = code_bytes(D, K_BITS)
    V_CODE_BYTES: tl.constexpr = code_bytes(D, V_BITS)
    top, total, out = state

    shift = ()
    for g in tl.static_range(V_GROUPS):
        shift = shift + (tl.zeros([BLOCK_M], tl.float32),)
    if K_BITS == EXACT:
        channel = tl.arange(0, D)
        q = narrow(_load_rows(q_rows, q_mask, 0, D).to(tl.float32), EXACT_DTYPE)
    else:
        largest = tl.full([], 1e-30, tl.float32)
        for u in tl.static_range(K_UNITS):
            wide = _load_rows(q_rows, q_mask, unit_start(u, D, K_BITS, K_GROUP), K_UNIT).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.max(tl.abs(wide), 1), 0))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = Q_PEAK / power
        unscale = power * (sm_scale * Q_UNSCALE)
        q = ()
        q_sums = ()
        for g in tl.static_range(K_GROUPS):
            q_sum = tl.zeros([BLOCK_M], tl.float32)
            for u in tl.static_range(K_UNITS):
                if unit_group(u, D, K_BITS, K_GROUP) == g:
                    wide = _load_rows(q_rows, q_mask, unit_start(u, D, K_BITS, K_GROUP), K_UNIT).to(tl.float32)
                    q_sum += tl.sum(wide, 1)
            q_sums = q_sums + (q_sum * (sm_scale * LOG2_E),)
        for u in tl.static_range(K_UNITS):
            wide = _load_rows(q_rows, q_mask, unit_start(u, D, K_BITS, K_GROUP), K_UNIT).to(tl.float32)
            q = q + ((wide * (factor * (1.0 / unit_weight(u, K_BITS)))).to(tl.float16),)

    offset = tl.arange(0, BLOCK_N)
    k_byte = tl.arange(0, K_UNIT)
    v_byte = tl.arange(0, V_UNIT)
    PARAM: tl.constexpr = 2 * (SCALE_DTYPE.primitive_bitwidth // 8)
    k_head_params = KV_HEADS * K_CODE_BYTES + head * (K_GROUPS * PARAM)
    v_head_params = KV_HEADS * V_CODE_BYTES + head * (V_GROUPS * PARAM)
    for tile in range(begin // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N):
        position = tile * BLOCK_N + offset
        live = (position >= begin) & (position < end)
        if PAGE >= BLOCK_N:
            page = tl.load(pages_ptr + (tile * BLOCK_N) // PAGE).to(tl.int64)
            slot = page * PAGE + (tile * BLOCK_N) % PAGE + offset
        else:
            page = tl.load(pages_ptr + position // PAGE, mask=live, other=0).to(tl.int64)
            # Not position % PAGE: from that Triton concludes that every slot is a multiple of PAGE.
            slot = page * PAGE + (position & (PAGE - 1))
        k_row = k_rows_ptr + slot * K_STRIDE
        v_row = v_rows_ptr + slot * V_STRIDE

        if K_BITS == EXACT:
            at = exact_channels(k_row, head, D, EXACT_DTYPE)[None, :] + channel[:, None]
            logits = dot(q, tl.load(at), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * (sm_scale * LOG2_E)
        else:
            scales, zeros = load_params(k_row + k_head_params, K_GROUPS, SCALE_DTYPE)
            codes = ()
            for span in tl.static_range(K_UNITS // plane_count(K_BITS)):
                at = k_row[None, :] + head * K_CODE_BYTES
                codes = codes + load_codes(at, span, k_byte[:, None], D, K_BITS, K_UNIT)
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for g in tl.static_range(K_GROUPS):
                product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for u in tl.static_range(K_UNITS):
                    if unit_group(u, D, K_BITS, K_GROUP) == g:
                        product = dot(q[u], codes[u], product)
                logits += product * (scales[g] * unscale)[None, :]
                logits -= q_sums[g][:, None] * (scales[g] * zeros[g])[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))

        if V_BITS != EXACT:
            scales, zeros = load_params(v_row + v_head_params, V_GROUPS, SCALE_DTYPE)
            largest_scale = scales[0]
            for g in tl.static_range(1, V_GROUPS):
                largest_scale = tl.maximum(largest_scale, scales[g])
            largest_scale = tl.where(live, tl.maximum(largest_scale, 1e-30), 1.0)
            logits += log2(largest_scale)[None, :]
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = exp2(top - new_top)
        top = new_top
        p = exp2(logits - top[:, None])
        new_out = ()
        if V_BITS == EXACT:
            total = total * fade + tl.sum(p, 1)
            weight = narrow(p, EXACT_DTYPE)
            numbers = exact_channels(v_row, head, D, EXACT_DTYPE)
            for u in tl.static_range(V_UNITS):
                v = _load_rows(numbers, live, unit_start(u, D, V_BITS, V_GROUP), V_UNIT)
                new_out = new_out + (dot(weight, v, out[u] * fade[:, None]),)
        else:
            inverse = reciprocal(largest_scale)
            total = total * fade + tl.sum(p * inverse[None, :], 1)

            codes = ()
            for span in tl.static_range(V_UNITS // plane_count(V_BITS)):
                at = v_row[:, None] + head * V_CODE_BYTES
                codes = codes + load_codes(at, span, v_byte[None, :], D, V_BITS, V_UNIT)
            weights = ()
            new_shift = ()
            for g in tl.static_range(V_GROUPS):
                weight = p
                if V_GROUPS > 1:
                    weight = p * tl.where(live, scales[g] * inverse, 0.0)[None, :]
                weights = weights + (weight.to(tl.float16),)
                # In float32: a group of equal values has a tiny scale and a zero point as large as that is small.
                zero = tl.where(live, zeros[g], 0.0)
                new_shift = new_shift + (shift[g] * fade + tl.sum(weight * zero[None, :], 1),)
            shift = new_shift
            for u in tl.static_range(V_UNITS):
                weight = weights[unit_group(u, D, V_BITS, V_GROUP)]
                new_out = new_out + (dot(weight, codes[u], out[u] * fade[:, None]),)
        out = new_out

    if V_BITS != EXACT:
        values = ()
        for u in tl.static_range(V_UNITS):
            moved = shift[unit_group(u, D, V_BITS, V_GROUP)]
            values = values + (out[u] * (CODES_PER_UNIT / unit_weight(u, V_BITS)) - moved[:, None],)
        out = values
    return top, total, out


@triton.jit
def _fold(
    state, q, k_rows, v_rows, live, visible, sm_scale, D: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold a tile of 16-bit keys and values at row pointers [BLOCK_N] into ``state``.

    ``live`` [BLOCK_N] says which rows exist, ``visible`` [BLOCK_M, BLOCK_N] who sees them; both only if MASKED.
    """
    top, total, out = state
    k_at = k_rows[None, :] + tl.arange(0, D)[:, None]
    if MASKED:
        k = tl.load(k_at, mask=live[None, :], other=0.0)
    else:
        k = tl.load(k_at)
    logits = dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32)) * (sm_scale * LOG2_E)
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    fade = exp2(top - new_top)
    p = exp2(logits - new_top[:, None])
    total = total * fade + tl.sum(p, 1)
    p = narrow(p, v_rows.dtype.element_ty)
    new_out = ()
    UNIT: tl.constexpr = unit_size(D, V_BITS, V_GROUP)
    for u in tl.static_range(D // UNIT):
        if MASKED:
            v = _load_rows(v_rows, live, unit_start(u, D, V_BITS, V_GROUP), UNIT)
        else:
            v = tl.load(v_rows[:, None] + (unit_start(u, D, V_BITS, V_GROUP) + tl.arange(0, UNIT))[None, :])
        new_out = new_out + (dot(p, v, out[u] * fade[:, None]),)
    return new_top, total, new_out


@triton.jit(do_not_specialize=["batch", "page_table_stride"])
def _extend_kernel(
    q_ptr, q_stride_token, q_stride_head, q_rot_ptr, q_rot_stride_token, q_rot_stride_head, k_ptr, k_stride_token,
    k_stride_head, v_ptr, v_stride_token, v_stride_head, k_rows_ptr, v_rows_ptr,
    k_sink_ptr, v_sink_ptr, k_ring_ptr, v_ring_ptr, page_table_ptr, page_table_stride, kv_lens_ptr, ring_row_ptr,
    ring_start_ptr, sink_block_ptr, qo_indptr_ptr, out_ptr, out_stride_token, out_stride_head, lse_ptr, batch,
    sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GQA: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_LSE: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TOKENS tokens, at most one short one per request; kv heads)."""
    UNIT: tl.constexpr = unit_size(D, V_BITS, V_GROUP)
    UNITS: tl.constexpr = D // UNIT
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
        top, total, out = _history(
            (top, total, out), q_rows, q_mask, k_rows_ptr, v_rows_ptr,
            page_table_ptr + request.to(tl.int64) * page_table_stride, head, sink_end, ring_begin, sm_scale, K_STRIDE,
            V_STRIDE, KV_HEADS, D, K_BITS, V_BITS, K_GROUP, V_GROUP, SCALE_DTYPE, EXACT_DTYPE, PAGE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    offset = tl.arange(0, BLOCK_N)
    if SINK + RECENT > 0:
        q = narrow(_load_rows(q_rows, q_mask, 0, D).to(tl.float32), k_sink_ptr.dtype.element_ty)
        if SINK > 0:
            block = tl.load(sink_block_ptr + request).to(tl.int64) * SINK
            for start in range(0, sink_end, BLOCK_N):
                live = start + offset < sink_end
                at = ((block + start + offset) * KV_HEADS + head) * D
                top, total, out = _fold(
                    (top, total, out),
                    q,
                    k_sink_ptr + at,
                    v_sink_ptr + at,
                    live,
                    live[None, :],
                    sm_scale,
                    D,
                    V_BITS,
                    V_GROUP,
                    True,
                )
        if RECENT > 0:
            ring = tl.load(ring_row_ptr + request).to(tl.int64) * RING
            for start in range(ring_begin, kv_len, BLOCK_N):
                live = start + offset < kv_len
                at = ((ring + (start + offset) % RING) * KV_HEADS + head) * D
                top, total, out = _fold(
                    (top, total, out),
                    q,
                    k_ring_ptr + at,
                    v_ring_ptr + at,
                    live,
                    live[None, :],
                    sm_scale,
                    D,
                    V_BITS,
                    V_GROUP,
                    True,
                )
    if HAS_CHUNK:
        q = _load_rows(q_ptr + index * q_stride_token + q_head * q_stride_head, q_mask, 0, D)
        # Tiles before the first token of this program are seen by all of its rows.
        seen_by_all = tile * TOKENS // BLOCK_N * BLOCK_N
        for start in range(0, seen_by_all, BLOCK_N):
            at = (chunk_begin + start + offset).to(tl.int64)
            top, total, out = _fold(
                (top, total, out), q, k_ptr + at * k_stride_token + head * k_stride_head,
                v_ptr + at * v_stride_token + head * v_stride_head, 0, 0, sm_scale, D, V_BITS, V_GROUP, False,
            )  # fmt: skip
        for start in range(seen_by_all, tl.minimum((tile + 1) * TOKENS, length), BLOCK_N):
            key = start + offset
            at = (chunk_begin + key).to(tl.int64)
            top, total, out = _fold(
                (top, total, out), q, k_ptr + at * k_stride_token + head * k_stride_head,
                v_ptr + at * v_stride_token + head * v_stride_head, key < length, key[None, :] <= token[:, None],
                sm_scale, D, V_BITS,
                    V_GROUP, True,
            )  # fmt: skip

    # Nothing to attend to (only without the chunk): zeros, and a log-sum-exp of -inf.
    inverse = tl.where(total == 0, 0.0, 1.0 / total)
    rows = out_ptr + index * out_stride_token + q_head * out_stride_head
    for u in tl.static_range(UNITS):
        channel = unit_start(u, D, V_BITS, V_GROUP) + tl.arange(0, UNIT)
        value = narrow(out[u] * inverse[:, None], out_ptr.dtype.element_ty)
        tl.store(rows[:, None] + channel[None, :], value, mask=q_mask[:, None])
    if HAS_LSE:
        tl.store(lse_ptr + index * (KV_HEADS * GQA) + q_head, top + tl.log2(total), mask=q_mask)


def extend(
    cache: LayerCache,
    tables: BatchTables,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    prefix_only: bool = False,
) -> torch.Tensor:
    """Causal attention of a chunk per request: exact within the chunk, over the cache before it.

    Runs before the chunk is stored: the ring may hold positions that the chunk is about to overwrite. Channels of
    every tensor are contiguous; tokens and heads may have any stride.

    Args:
        cache: the layer's cache, without the chunk.
        tables: the batch; ``kv_lens`` counts the cached tokens before the chunk and may be 0.
        q: [tokens, q_heads, head_dim] of all chunks one after the other, not rotated.
        k, v: [tokens, kv_heads, head_dim]; ``k`` not rotated, ``v`` in the basis of the cached values.
        qo_indptr: int32 [batch + 1], first token of every chunk, then the number of tokens; on the device. A chunk
            may be empty.
        q_rot: ``q`` rotated (:func:`oscar_kernels.triton.rotate.rotate`).
        sm_scale: factor on the logits.
        out: [tokens, q_heads, head_dim]; like ``q`` where None. Rows beyond the last chunk are not written.
        lse: float32 [tokens, q_heads], contiguous; takes the log2 of the sum of exp2 of the logits (times log2 e),
            which FlashInfer's merge_state expects. -inf where nothing was attended to.
        prefix_only: attend to the cache only, every query to all of it; ``k`` and ``v`` are not used.

    Returns:
        ``out``, in the basis of the cached values.
    """
    kv_heads, windows = cache.kv_heads, cache.windows
    tokens, q_heads, head_dim = q_rot.shape
    if head_dim != cache.head_dim or q_heads % kv_heads:
        raise ValueError(f"queries {tuple(q_rot.shape)} do not fit {kv_heads} kv heads of {cache.head_dim}")
    if not prefix_only and (k is None or v is None):
        raise ValueError("keys and values of the chunk are needed unless prefix_only")
    if cache.k_sink.dtype != cache.k_ring.dtype:
        raise ValueError("sink store and ring must have one dtype")
    if k is None or v is None or prefix_only:
        q = k = v = q_rot
    for name, x in (("q", q), ("q_rot", q_rot), ("k", k), ("v", v)):
        if x.stride(2) != 1:
            raise ValueError(f"{name} must have contiguous channels")
    check_lse(lse, tokens, q_heads)
    out = torch.empty(q_rot.shape, dtype=q_rot.dtype, device=q_rot.device) if out is None else out
    batch = qo_indptr.shape[0] - 1
    if tokens == 0 or batch == 0:
        return out
    gqa = q_heads // kv_heads
    block_m, block_n, warps = (128, 64, 8) if head_dim < 256 else (64, 32, 8)
    per_tile = block_m // gqa
    _extend_kernel[(triton.cdiv(tokens, per_tile) + batch, kv_heads)](
        q, q.stride(0), q.stride(1), q_rot, q_rot.stride(0), q_rot.stride(1), k, k.stride(0), k.stride(1), v,
        v.stride(0), v.stride(1), cache.k_rows, cache.v_rows,
        cache.k_sink, cache.v_sink, cache.k_ring, cache.v_ring, tables.page_table, tables.page_table.stride(0),
        tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block, qo_indptr, out, out.stride(0),
        out.stride(1), qo_indptr if lse is None else lse, batch, sm_scale, K_STRIDE=cache.k_rows.stride(0),
        V_STRIDE=cache.v_rows.stride(0), KV_HEADS=kv_heads, GQA=gqa,
        D=head_dim, **row_constants(cache), PAGE=tables.page_size,
        SINK=windows.sink, RECENT=windows.recent, RING=max(windows.ring, 1), HAS_CHUNK=not prefix_only,
        HAS_LSE=lse is not None, BATCH=max(triton.next_power_of_2(batch), 64), TOKENS=per_tile, BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return out
