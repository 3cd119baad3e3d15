"""Cached prefixes as 16-bit keys and values: what a stock attention kernel needs to read the INT2 cache.

The copy is in the rotated basis, so it is attended to with rotated queries. It lives in a workspace of fixed size;
prefixes that do not fit are worked on span by span, and the results merged (:mod:`oscar_kernels.triton.merge_states`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, LayerCache, check_16_bit_rows
from oscar_kernels.spans import Spans
from oscar_kernels.triton.arith import (
    CODEBOOK,
    EXACT,
    code_bytes,
    exact_channels,
    load_params,
    narrow,
    param_bytes,
    plane_count,
    point_channel,
    unit_group,
    unit_size,
    unit_start,
)
from oscar_kernels.triton.dtypes import TRITON_DTYPES, codebook_tensors, row_constants
from oscar_kernels.triton.finite import finite_or_zero
from oscar_kernels.triton.padding import channel_mask, padded
from oscar_kernels.triton.plan import split_lengths

BLOCK = 64
"""Positions per program."""
FEWEST_SPANS = 64
"""That the kernel is compiled for: it is compiled anew for more, while a request waits."""


@triton.jit
def _copy_window(out_rows, window_rows, mask, D: tl.constexpr, FINITE: tl.constexpr, DTYPE: tl.constexpr):
    """Rows of the sink store or the ring at pointers [BLOCK] to the workspace."""
    channel, exists = tl.arange(0, padded(D)), channel_mask(mask, D)
    x = tl.load(window_rows[:, None] + channel[None, :], mask=exists, other=0.0).to(tl.float32)
    if FINITE:
        x = finite_or_zero(x)
    tl.store(out_rows[:, None] + channel[None, :], narrow(x, DTYPE), mask=exists)


@triton.jit
def _decode_rows(
    out_rows, rows, mask, head, KV_HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, CODING: tl.constexpr,
    GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, FINITE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One head of the history rows of codes at byte pointers [BLOCK], dequantized, to the workspace."""
    CODE_BYTES: tl.constexpr = code_bytes(D, BITS)
    PLANES: tl.constexpr = plane_count(BITS)
    GROUPS: tl.constexpr = D // GROUP
    UNIT: tl.constexpr = unit_size(D, BITS, GROUP)
    params = rows + (KV_HEADS * CODE_BYTES + head * param_bytes(GROUPS, SCALE_DTYPE, CODING))
    scales, zeros = load_params(params, GROUPS, SCALE_DTYPE, BITS, CODING)
    byte = tl.arange(0, UNIT)
    codes = rows[:, None] + head * CODE_BYTES
    for span in tl.static_range(D // UNIT // PLANES):
        at = span * UNIT + byte
        packed = tl.load(codes + at[None, :]).to(tl.int32)
        if BITS == 3:
            high = tl.load(codes + (D // 4 + at // 8 * 4 + at % 4)[None, :]).to(tl.int32) >> (at // 4 % 2)[None, :]
        for plane in tl.static_range(PLANES):
            scale = scales[unit_group(PLANES * span + plane, D, BITS, GROUP)]
            zero = zeros[unit_group(PLANES * span + plane, D, BITS, GROUP)]
            if BITS == 4:
                code = (packed >> (4 * plane)) & 15
            else:
                code = (packed >> (2 * plane)) & 3
            if BITS == 3:
                code += (high >> ((2 * plane + 2) % 8) & 1) << 2
            x = scale[:, None] * (code.to(tl.float32) - zero[:, None])
            if FINITE:
                x = finite_or_zero(x)
            channel = unit_start(PLANES * span + plane, D, BITS, GROUP) + byte
            tl.store(out_rows[:, None] + channel[None, :], narrow(x, DTYPE), mask=mask[:, None])


@triton.jit
def _look_up_rows(
    out_rows, rows, mask, head, points_ptr, factor_ptr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One head of the history rows of a codebook at byte pointers [BLOCK], as numbers, to the workspace."""
    CODE_BYTES: tl.constexpr = D // 4
    params = rows + (KV_HEADS * CODE_BYTES + head * param_bytes(1, SCALE_DTYPE, CODEBOOK))
    scales, _ = load_params(params, 1, SCALE_DTYPE, 2, CODEBOOK)
    # In pieces of a power of two.
    PIECE: tl.constexpr = CODE_BYTES & -CODE_BYTES
    for first in tl.static_range(0, CODE_BYTES, PIECE):
        byte = first + tl.arange(0, PIECE)
        index = tl.load(rows[:, None] + (head * CODE_BYTES + byte)[None, :]).to(tl.int32)
        word = tl.load(points_ptr + ((head * CODE_BYTES + byte) * 256)[None, :] + index)
        factor = tl.load(factor_ptr + head * CODE_BYTES + byte)
        for j in tl.static_range(4):
            x = scales[0][:, None] * (factor[None, :] * point_channel(word, j).to(tl.float32))
            tl.store(out_rows[:, None] + (4 * byte + j)[None, :], narrow(x, DTYPE), mask=mask[:, None])


@triton.jit
def _copy_exact(
    out_rows, rows, mask, head, D: tl.constexpr, EXACT_DTYPE: tl.constexpr, FINITE: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """One head of the history rows of 16 bits at byte pointers [BLOCK] to the workspace."""
    _copy_window(out_rows, exact_channels(rows, head, D, EXACT_DTYPE), mask, D, FINITE, DTYPE)


@triton.jit
def _copy_side(
    out_ptr, rows_ptr, points_ptr, factor_ptr, sink_ptr, ring_ptr, pages_ptr, position, out_row, live, head, sink_end,
    ring_begin, block, ring, STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    CODING: tl.constexpr, GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr,
    RECENT: tl.constexpr, RING: tl.constexpr, OUT_HEADS: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head at positions [BLOCK] of a request, each from where it is read.

    FINITE: what is no number becomes 0. A tile of keys may reach into the next request's; there weights are 0, but
    0 x NaN is NaN.
    """
    out_rows = out_ptr + (out_row.to(tl.int64) * OUT_HEADS + head) * D
    history = live & (position >= sink_end) & (position < ring_begin)
    if tl.max(history.to(tl.int32), 0) > 0:
        page = tl.load(pages_ptr + position // PAGE, mask=history, other=0).to(tl.int64)
        # Masked positions read the dummy page 0 and write nothing.
        rows = rows_ptr + (page * PAGE + (position & (PAGE - 1))) * STRIDE
        if BITS == EXACT:
            _copy_exact(out_rows, rows, history, head, D, EXACT_DTYPE, FINITE, DTYPE)
        elif CODING == CODEBOOK:
            _look_up_rows(out_rows, rows, history, head, points_ptr, factor_ptr, KV_HEADS, D, SCALE_DTYPE, DTYPE)
        else:
            _decode_rows(out_rows, rows, history, head, KV_HEADS, D, BITS, CODING, GROUP, SCALE_DTYPE, FINITE, DTYPE)
    if SINK > 0:
        sink = live & (position < sink_end)
        if tl.max(sink.to(tl.int32), 0) > 0:
            _copy_window(out_rows, sink_ptr + ((block * SINK + position) * KV_HEADS + head) * D, sink, D, FINITE, DTYPE)
    if RECENT > 0:
        recent = live & (position >= ring_begin)
        if tl.max(recent.to(tl.int32), 0) > 0:
            at = ((ring * RING + position % RING) * KV_HEADS + head) * D
            _copy_window(out_rows, ring_ptr + at, recent, D, FINITE, DTYPE)


@triton.jit(do_not_specialize=["spans", "page_table_stride"])
def _prefix_kernel(
    k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr, k_sink_ptr, v_sink_ptr, k_ring_ptr, v_ring_ptr,
    page_table_ptr, page_table_stride,
    kv_lens_ptr, ring_row_ptr, ring_start_ptr, sink_block_ptr, request_ptr, begin_ptr, indptr_ptr, k_out_ptr,
    v_out_ptr, spans,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_CODING: tl.constexpr, V_CODING: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, DTYPE: tl.constexpr, PAGE: tl.constexpr, SINK: tl.constexpr,
    RECENT: tl.constexpr, RING: tl.constexpr, OUT_HEADS: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads; tiles of BLOCK positions, at most one short one per span; keys and values)."""
    head = tl.program_id(0)
    work = tl.program_id(1)
    ids = tl.arange(0, SPANS)
    first = tl.load(indptr_ptr + ids, mask=ids < spans, other=0)
    last = tl.load(indptr_ptr + ids + 1, mask=ids < spans, other=0)
    tiles = (last - first + BLOCK - 1) // BLOCK
    ends = tl.cumsum(tiles, 0)
    span = tl.sum((ends <= work).to(tl.int32), 0)
    if span >= spans:
        return
    offset = (work - tl.sum(tl.where(ids == span, ends - tiles, 0), 0)) * BLOCK + tl.arange(0, BLOCK)
    out_first = tl.load(indptr_ptr + span)
    request = tl.load(request_ptr + span)
    position = tl.load(begin_ptr + span) + offset
    kv_len = tl.load(kv_lens_ptr + request)
    live = (offset < tl.load(indptr_ptr + span + 1) - out_first) & (position < kv_len)
    sink_end, ring_begin = split_lengths(kv_len, tl.load(ring_start_ptr + request), SINK, RECENT)
    block = tl.load(sink_block_ptr + request).to(tl.int64)
    ring = tl.load(ring_row_ptr + request).to(tl.int64)
    pages_ptr = page_table_ptr + request.to(tl.int64) * page_table_stride
    if tl.program_id(2) == 0:
        _copy_side(
            k_out_ptr, k_rows_ptr, k_points_ptr, k_factor_ptr, k_sink_ptr, k_ring_ptr, pages_ptr, position,
            out_first + offset, live, head,
            sink_end, ring_begin, block, ring, K_STRIDE, KV_HEADS, D, K_BITS, K_CODING, K_GROUP, SCALE_DTYPE,
            EXACT_DTYPE, DTYPE, PAGE, SINK, RECENT, RING, OUT_HEADS, False,
        )  # fmt: skip
    else:
        _copy_side(
            v_out_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr, v_sink_ptr, v_ring_ptr, pages_ptr, position,
            out_first + offset, live, head,
            sink_end, ring_begin, block, ring, V_STRIDE, KV_HEADS, V_D, V_BITS, V_CODING, V_GROUP, SCALE_DTYPE,
            EXACT_DTYPE, DTYPE, PAGE, SINK, RECENT, RING, OUT_HEADS, True,
        )  # fmt: skip


def copy_prefixes(
    cache: LayerCache, tables: BatchTables, spans: Spans, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """Write spans of cached keys and values, one after the other, in 16 bits and in the rotated basis.

    Args:
        cache: the layer's cache.
        tables: the batch; of a span, what lies behind ``kv_lens`` is left as it is.
        spans: what is copied.
        k_out, v_out: [rows, kv_heads, head_dim of keys or of values], heads contiguous, bfloat16 or float16, with at
            least as many rows as the spans have. Only their shape decides how many programs run: pass views of the
            right length.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    kv_heads, windows = cache.kv_heads, cache.windows
    check_16_bit_rows(k_out, v_out, cache)
    count = len(spans.requests)
    if k_out.shape[0] == 0 or count == 0:
        return
    _prefix_kernel[(kv_heads, triton.cdiv(k_out.shape[0], BLOCK) + count, 2)](
        cache.k_rows, cache.v_rows, *codebook_tensors(cache.k_codebook, cache.k_layout.coding, k_out), cache.k_sink,
        cache.v_sink, cache.k_ring, cache.v_ring, tables.page_table,
        tables.page_table.stride(0), tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block, *spans,
        k_out, v_out, count, K_STRIDE=cache.k_rows.stride(0), V_STRIDE=cache.v_rows.stride(0),
        KV_HEADS=kv_heads, **row_constants(cache), DTYPE=TRITON_DTYPES[k_out.dtype], PAGE=tables.page_size,
        SINK=windows.sink, RECENT=windows.recent, RING=max(windows.ring, 1),
        OUT_HEADS=k_out.stride(0) // cache.head_dim, SPANS=max(triton.next_power_of_2(count), FEWEST_SPANS),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
