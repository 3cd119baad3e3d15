"""Decode: attention of one new token per request, or several in verification, over its cache, split over the sequence.

The history of the batch is cut into *pieces*, runs of tiles of one request, and the sinks and recent tokens into
window parts of WINDOW_PART tokens. One grid covers them all; each program attends to one of them with BLOCK_H kv
heads and leaves a normalized partial result with its log-sum-exp; a second kernel merges the partials of a request.

How many pieces a request gets is worked out on the device by every program from the lengths of the whole batch, so
that pieces are equally long whatever the lengths are, the grid depends on shapes only and no length reaches the host.

A warp works on one kv head: it unpacks a tile's codes without converting them (see :mod:`arith`), and scale and zero
point never touch a code: with c the codes, s and z scale and zero point of a token's group,
``q . k = s (q . c - z sum(q))`` and ``sum p v = sum (p s) c - sum p s z``. So that p s fits float16 whatever
the scale of the values, the running maximum of the online softmax is that of log2(p s), not of log2(p).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, LayerCache, Windows, check_lse, check_queries, check_visible
from oscar_kernels.triton.arith import (
    CODES_PER_UNIT,
    LOG2_E,
    code_bytes,
    dot,
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
from oscar_kernels.triton.dtypes import row_constants
from oscar_kernels.triton.merge import merge_kernel
from oscar_kernels.triton.plan import plan_pieces, split_lengths

WINDOW_PART = 128
"""Window tokens of one program, unless that takes more programs than the windows allow."""
WAVES = 1
"""Pieces per resident program: more balance the GPU better, fewer leave less to merge."""
MIN_TILES = 4
"""Tiles that a piece has at least."""
HEADS_PER_PROGRAM = 2
"""kv heads, and so warps, of a program at most."""
BLOCK_W = 16
"""Tokens of a tile of a window."""
MOST_COLUMNS = 16
"""Query heads, of one token after the other, that read a kv head together in verification; one token may have more."""
STAGES = 6
"""Tiles in flight, the one worked on included."""
Q_PEAK = tl.constexpr(2.0**13)
"""Queries enter the tensor cores as float16 with largest magnitude in [Q_PEAK, 2 Q_PEAK)."""
LOWEST = tl.constexpr(-1e30)
"""Running maximum of columns that have seen nothing yet, where that may be."""
Q_UNSCALE = tl.constexpr(1.4426950408889634 * 2.0**24 / 2.0**13)
"""log2(e) * CODES_PER_UNIT / Q_PEAK: what makes a product of such queries with codes a logit in log2."""


@triton.jit
def _load_units(q_rows, mask, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The queries by units of the keys (:func:`unit_start`): float32 [BLOCK_H, UNIT, BLOCK_G] each."""
    UNIT: tl.constexpr = unit_size(D, BITS, GROUP)
    units = ()
    for u in tl.static_range(D // UNIT):
        channel = unit_start(u, D, BITS, GROUP) + tl.arange(0, UNIT)
        q = tl.load(q_rows[:, None, :] + channel[None, :, None], mask=mask[:, None, :], other=0.0)
        units = units + (q.to(tl.float32),)
    return units


@triton.jit
def _history(
    q_rows, q_mask, k_rows_ptr, v_rows_ptr, pages_ptr, head,
    tile_begin, tile_end, begin, end, sm_scale, o_rows, lse_ptrs,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of history: positions [begin, end) of tiles [tile_begin, tile_end); every tile has one at least."""
    K_UNIT: tl.constexpr = unit_size(D, K_BITS, K_GROUP)
    V_UNIT: tl.constexpr = unit_size(D, V_BITS, V_GROUP)
    K_UNITS: tl.constexpr = D // K_UNIT
    V_UNITS: tl.constexpr = D // V_UNIT
    K_GROUPS: tl.constexpr = D // K_GROUP
    V_GROUPS: tl.constexpr = D // V_GROUP
    K_CODE_BYTES: tl.constexpr = code_bytes(D, K_BITS)
    V_CODE_BYTES: tl.constexpr = code_bytes(D, V_BITS)

    # Queries: normalized by one power of two, without the weight that its bit position gives to a plane.
    wide = _load_units(q_rows, q_mask, D, K_BITS, K_GROUP)
    largest = tl.full([], 1e-30, tl.float32)
    for u in tl.static_range(K_UNITS):
        largest = tl.maximum(largest, tl.max(tl.max(tl.max(tl.abs(wide[u]), 2), 1), 0))
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    factor = Q_PEAK / power
    unscale = power * (sm_scale * Q_UNSCALE)
    q = ()
    for u in tl.static_range(K_UNITS):
        q = q + ((wide[u] * (factor * (1.0 / unit_weight(u, K_BITS)))).to(tl.float16),)
    q_sums = ()
    for g in tl.static_range(K_GROUPS):
        q_sum = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
        for u in tl.static_range(K_UNITS):
            if unit_group(u, D, K_BITS, K_GROUP) == g:
                q_sum += tl.sum(wide[u], 1)
        q_sums = q_sums + ((q_sum * (sm_scale * LOG2_E))[:, None, :],)

    offset = tl.arange(0, BLOCK_N)
    k_byte = tl.arange(0, K_UNIT)
    v_byte = tl.arange(0, V_UNIT)
    top = tl.full([BLOCK_H, BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
    shift = ()
    for g in tl.static_range(V_GROUPS):
        shift = shift + (tl.zeros([BLOCK_H, BLOCK_G], tl.float32),)
    out = ()
    for u in tl.static_range(V_UNITS):
        out = out + (tl.zeros([BLOCK_H, V_UNIT, BLOCK_G], tl.float32),)

    PARAM: tl.constexpr = 2 * (SCALE_DTYPE.primitive_bitwidth // 8)
    k_head_params = KV_HEADS * K_CODE_BYTES + head * (K_GROUPS * PARAM)
    v_head_params = KV_HEADS * V_CODE_BYTES + head * (V_GROUPS * PARAM)
    for tile in range(tile_begin, tile_end):
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

        # Every slot of a tile exists and any byte is four codes, so code loads need no mask; what lies outside
        # [begin, end) is cut off at the logits and at the scales and zero points of the values.
        scales, zeros = load_params(k_row[None, :] + k_head_params[:, None], K_GROUPS, SCALE_DTYPE)
        at = k_row[None, :, None] + (head * K_CODE_BYTES)[:, None, None]
        codes = ()
        for span in tl.static_range(K_UNITS // plane_count(K_BITS)):
            codes = codes + load_codes(at, span, k_byte[None, None, :], D, K_BITS, K_UNIT)
        logits = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)
        for g in tl.static_range(K_GROUPS):
            product = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)
            for u in tl.static_range(K_UNITS):
                if unit_group(u, D, K_BITS, K_GROUP) == g:
                    product = dot(codes[u], q[u], product)
            logits += product * (scales[g] * unscale)[:, :, None]
            logits -= (scales[g] * zeros[g])[:, :, None] * q_sums[g]
        logits = tl.where(live[None, :, None], logits, float("-inf"))

        # Online softmax over log2(p * largest value scale).
        scales, zeros = load_params(v_row[None, :] + v_head_params[:, None], V_GROUPS, SCALE_DTYPE)
        largest_scale = scales[0]
        for g in tl.static_range(1, V_GROUPS):
            largest_scale = tl.maximum(largest_scale, scales[g])
        largest_scale = tl.where(live[None, :], tl.maximum(largest_scale, 1e-30), 1.0)
        logits += log2(largest_scale)[:, :, None]
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = exp2(top - new_top)
        top = new_top
        p = exp2(logits - top[:, None, :])
        inverse = reciprocal(largest_scale)
        total = total * fade + tl.sum(p * inverse[:, :, None], 1)

        at = v_row[None, None, :] + (head * V_CODE_BYTES)[:, None, None]
        codes = ()
        for span in tl.static_range(V_UNITS // plane_count(V_BITS)):
            codes = codes + load_codes(at, span, v_byte[None, :, None], D, V_BITS, V_UNIT)
        weights = ()
        new_shift = ()
        for g in tl.static_range(V_GROUPS):
            weight = p
            if V_GROUPS > 1:
                weight = p * tl.where(live[None, :], scales[g] * inverse, 0.0)[:, :, None]
            weights = weights + (weight.to(tl.float16),)
            # In float32: a group of equal values has a tiny scale and a zero point as large as that is small.
            zero = tl.where(live[None, :], zeros[g], 0.0)
            new_shift = new_shift + (shift[g] * fade + tl.sum(weight * zero[:, :, None], 1),)
        shift = new_shift
        new_out = ()
        for u in tl.static_range(V_UNITS):
            weight = weights[unit_group(u, D, V_BITS, V_GROUP)]
            new_out = new_out + (dot(codes[u], weight, out[u] * fade[:, None, :]),)
        out = new_out

    inverse = 1.0 / total
    for u in tl.static_range(V_UNITS):
        moved = shift[unit_group(u, D, V_BITS, V_GROUP)]
        value = (out[u] * (CODES_PER_UNIT / unit_weight(u, V_BITS)) - moved[:, None, :]) * inverse[:, None, :]
        channel = unit_start(u, D, V_BITS, V_GROUP) + v_byte
        tl.store(o_rows[:, None, :] + channel[None, :, None], value, mask=q_mask[:, None, :])
    tl.store(lse_ptrs, top + tl.log2(total), mask=q_mask)


@triton.jit
def _window(
    q_rows, q_mask, k_ptr, v_ptr, first_row, rows, head, begin, end, new, visible, sm_scale, o_rows, lse_ptrs,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    DRAFTS: tl.constexpr,
):  # fmt: skip
    """Positions [begin, end) of a 16-bit window, position p in row first_row + p % rows.

    In verification bit j of a column's word in visible [BLOCK_G] says whether it sees position new + j.
    """
    offset = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D)
    q = tl.load(q_rows[:, None, :] + channel[None, :, None], mask=q_mask[:, None, :], other=0.0)
    q = narrow(q.to(tl.float32), k_ptr.dtype.element_ty)
    top = tl.full([BLOCK_H, BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_H, D, BLOCK_G], tl.float32)
    head_at = (head * D)[:, None, None]
    # Two loop iterations in flight: more would take the shared memory of the history's tiles.
    for first in tl.range(begin, end, BLOCK_N, num_stages=2):
        position = first + offset
        live = position < end
        row = (first_row + position % rows) * (KV_HEADS * D)
        at = row[None, :, None] + head_at + channel[None, None, :]
        k = tl.load(k_ptr + at, mask=live[None, :, None], other=0.0)
        logits = dot(k, q, tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)) * (sm_scale * LOG2_E)
        logits = tl.where(live[None, :, None], logits, float("-inf"))
        if DRAFTS > 0:
            index = tl.maximum(position - new, 0).to(tl.int64)
            seen = (position < new)[:, None] | (((visible[None, :] >> index[:, None]) & 1) != 0)
            logits = tl.where(seen[None, :, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        if DRAFTS > 0:
            # A column may see nothing of a tile.
            new_top = tl.maximum(new_top, LOWEST)
        fade = exp2(top - new_top)
        top = new_top
        p = exp2(logits - top[:, None, :])
        total = total * fade + tl.sum(p, 1)
        at = row[None, None, :] + head_at + channel[None, :, None]
        v = tl.load(v_ptr + at, mask=live[None, None, :], other=0.0)
        out = dot(v, narrow(p, v_ptr.dtype.element_ty), out * fade[:, None, :])
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
def _decode_kernel(
    q_ptr, q_stride_token, q_stride_head, visible_ptr, k_rows_ptr, v_rows_ptr,
    k_sink_ptr, v_sink_ptr, k_ring_ptr, v_ring_ptr, page_table_ptr, page_table_stride, kv_lens_ptr,
    ring_row_ptr, ring_start_ptr, sink_block_ptr, o_ptr, lse_ptr, batch, pieces, sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GQA: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    RING: tl.constexpr, SINK_PARTS: tl.constexpr, WINDOW_PARTS: tl.constexpr, PART: tl.constexpr,
    MIN_TILES: tl.constexpr, BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, DRAFTS: tl.constexpr, QUERIES: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads / BLOCK_H, pieces + batch + batch * WINDOW_PARTS): heads of one token are read together.

    o [grid y, q_heads, D] float32 and lse [grid y, q_heads] float32 in log2 take the partial results; lse = -inf
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
    o_rows = o_ptr + partial * D
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
            _history(
                q_rows + first_token(request, DRAFTS, QUERIES, PASSES) * q_stride_token, q_mask, k_rows_ptr, v_rows_ptr,
                page_table_ptr + row.to(tl.int64) * page_table_stride, read_head,
                first_tile + tiles * piece // count, first_tile + tiles * (piece + 1) // count, begin, end, sm_scale,
                o_rows, lse_ptrs, K_STRIDE, V_STRIDE, KV_HEADS, D, K_BITS, V_BITS, K_GROUP, V_GROUP, SCALE_DTYPE, PAGE,
                BLOCK_H, BLOCK_G, BLOCK_N,
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
                sm_scale, o_rows, lse_ptrs, KV_HEADS, D, BLOCK_H, BLOCK_G, BLOCK_W, DRAFTS,
            )  # fmt: skip


def window_parts(windows: Windows, drafts: int = 0) -> tuple[int, int, int]:
    """Programs per request for the sink store and for the ring, and the tokens of each.

    In verification the ring has ``drafts`` new tokens besides the recent ones.
    """
    part, recent = WINDOW_PART, windows.recent + drafts
    bound = max(windows.max_splits, (windows.sink > 0) + (recent > 0))
    while triton.cdiv(windows.sink, part) + triton.cdiv(recent, part) > bound:
        part *= 2
    return triton.cdiv(windows.sink, part), triton.cdiv(recent, part), part


def queries_at_once(drafts: int, gqa: int) -> int:
    """Tokens of a request that one pass works on: passes of one size, of at most MOST_COLUMNS columns."""
    passes = triton.cdiv(drafts, max(min(MOST_COLUMNS // gqa, drafts), 1))
    return triton.cdiv(drafts, passes)


def passes_of(drafts: int, gqa: int) -> tuple[int, int]:
    """(tokens of a request that one pass works on, passes): one token in one pass without drafts."""
    queries = queries_at_once(drafts, gqa) if drafts else 1
    return queries, triton.cdiv(max(drafts, 1), queries)


def tile_shape(head_dim: int) -> tuple[int, int | None]:
    """(tokens of a tile of history, register limit).

    128 registers let 16 warps share a multiprocessor; the sums of 256 channels do not fit them.
    """
    return 32, None if head_dim == 256 else 128


def default_pieces(cache: LayerCache) -> int:
    """Pieces that fill the GPU: about 16 warps on every multiprocessor, WAVES times over."""
    device = cache.k_rows.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return max(1, WAVES * processors * 16 // max(cache.kv_heads, 1))


def workspace_numel(
    cache: LayerCache, q_heads: int, batch: int, max_kv_splits: int | None = None, drafts: int = 0
) -> int:
    """float32 elements that :func:`decode`, or :func:`verify` with ``drafts``, needs for partial results of up to
    ``batch`` requests.
    """
    pieces = default_pieces(cache) if max_kv_splits is None else max_kv_splits
    queries, passes = passes_of(drafts, q_heads // cache.kv_heads)
    partials = pieces + batch * passes * (1 + sum(window_parts(cache.windows, drafts)[:2]))
    return partials * q_heads * queries * (cache.head_dim + 1)


def decode(
    cache: LayerCache,
    tables: BatchTables,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    max_kv_splits: int | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query per request over its cached tokens, in a decode step the new one included.

    Nothing depends on lengths on the host, so a captured CUDA graph stays valid when ``tables`` change in place.

    Args:
        cache: the layer's cache, both sides with scales of one dtype; in a decode step the new tokens are stored in
            it already.
        tables: the batch; ``kv_lens`` counts what is attended to. Requests of length 0 get zeros.
        q_rot: [batch, q_heads, head_dim], rotated, bfloat16 or float16; channels contiguous.
        sm_scale: factor on the logits.
        out: [batch, q_heads, head_dim] with contiguous channels; like ``q_rot`` where None.
        workspace: float32 of :func:`workspace_numel` elements or more; allocated where None.
        max_kv_splits: pieces that the history of the whole batch is cut into, besides one per request.
        lse: float32 [batch, q_heads], contiguous; takes the log2 of the sum of exp2 of the logits (times log2 e), -inf
            for requests of length 0. Nothing of the kind is written where None.

    Returns:
        ``out``, in the basis of the cached values.
    """
    return _attend(cache, tables, None, q_rot, sm_scale, out, workspace, max_kv_splits, lse)


def verify(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    max_kv_splits: int | None = None,
) -> torch.Tensor:
    """Attention of several new tokens per request, as :func:`oscar_kernels.reference.verify` defines it.

    History is read once for every MOST_COLUMNS query heads of a kv head, of whichever tokens.

    Args:
        cache: the layer's cache; the new tokens are stored in it already.
        tables: the batch; ``kv_lens`` counts the tokens before the new ones.
        visible: int64 [batch, tokens], contiguous: which new tokens each of them sees
            (:mod:`oscar_kernels.visible`).
        q_rot: [batch * tokens, q_heads, head_dim], otherwise as for :func:`decode`.
        sm_scale, out, workspace, max_kv_splits: as for :func:`decode`.

    Returns:
        ``out``, in the basis of the cached values.

    Raises:
        ValueError: the ring is too small, or ``visible`` does not fit the queries.
    """
    check_visible(cache.windows, visible, len(q_rot))
    return _attend(cache, tables, visible, q_rot, sm_scale, out, workspace, max_kv_splits, None)


def _attend(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor | None,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    max_kv_splits: int | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    kv_heads, windows = cache.kv_heads, cache.windows
    tokens, q_heads, head_dim = q_rot.shape
    batch, drafts = (tokens, 0) if visible is None else visible.shape
    gqa = q_heads // kv_heads
    queries, passes = passes_of(drafts, gqa)
    check_queries(cache, q_rot)
    out = torch.empty(q_rot.shape, dtype=q_rot.dtype, device=q_rot.device) if out is None else out
    check_lse(lse, batch, q_heads)
    if batch == 0:
        return out
    pieces = default_pieces(cache) if max_kv_splits is None else max_kv_splits
    sink_parts, ring_parts, part = window_parts(windows, drafts)
    numel = workspace_numel(cache, q_heads, batch, pieces, drafts)
    # From here on a request is a pass over one, and heads are those of all tokens of a pass.
    batch, rows = batch * passes, q_heads * queries
    partials = pieces + batch * (1 + sink_parts + ring_parts)
    if workspace is None:
        workspace = torch.empty(numel, dtype=torch.float32, device=q_rot.device)
    elif workspace.numel() < numel or workspace.dtype != torch.float32:
        raise ValueError(f"workspace must hold {numel} float32, got {workspace.numel()} {workspace.dtype}")
    partial_lse = workspace[partials * rows * head_dim :]
    block_n, registers = tile_shape(head_dim)
    block_h = min(triton.next_power_of_2(kv_heads), HEADS_PER_PROGRAM)
    shared = {
        "D": head_dim,
        "SINK": windows.sink,
        "RECENT": windows.recent,
        "WINDOW_PARTS": sink_parts + ring_parts,
        "MIN_TILES": MIN_TILES,
        # One of few values, so that few variants are compiled.
        "BATCH": max(triton.next_power_of_2(batch), 64),
        "BLOCK_N": block_n,
        "GQA": gqa,
        "DRAFTS": drafts,
        "QUERIES": queries,
        "PASSES": passes,
    }
    _decode_kernel[(triton.cdiv(kv_heads, block_h), partials)](
        q_rot, q_rot.stride(0), q_rot.stride(1), q_rot if visible is None else visible, cache.k_rows, cache.v_rows,
        cache.k_sink, cache.v_sink, cache.k_ring, cache.v_ring, tables.page_table, tables.page_table.stride(0),
        tables.kv_lens, tables.ring_row,
        tables.ring_start, tables.sink_block, workspace, partial_lse, batch, pieces, sm_scale,
        K_STRIDE=cache.k_rows.stride(0), V_STRIDE=cache.v_rows.stride(0), KV_HEADS=kv_heads,
        PAGE=tables.page_size, **row_constants(cache), RING=max(windows.ring, 1),
        SINK_PARTS=sink_parts, PART=part, BLOCK_H=block_h,
        BLOCK_G=max(triton.next_power_of_2(gqa * queries), 8), BLOCK_W=BLOCK_W, **shared,
        num_warps=block_h, num_stages=STAGES, maxnreg=registers,
    )  # fmt: skip
    # Few query heads have many partials each: share a head's channels among programs, and read more at a time.
    per_request = triton.cdiv(pieces, batch) + sink_parts + ring_parts
    block = min(max(triton.next_power_of_2(per_request), 4), 64)
    block_d = min(head_dim, 32 if batch * rows < 512 else head_dim)
    merge_kernel[(batch, rows, head_dim // block_d)](
        workspace, partial_lse, out, out.stride(0), out.stride(1), partial_lse if lse is None else lse, tables.kv_lens,
        tables.ring_start, batch, pieces, Q_HEADS=rows, BLOCK=block, BLOCK_D=block_d, HAS_LSE=lse is not None,
        **shared, num_warps=min(max(block * block_d // 1024, 1), 4),
    )  # fmt: skip
    return out
