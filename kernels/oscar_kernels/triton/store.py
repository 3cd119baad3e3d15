"""Store: rotate, clip, quantize and pack new tokens into the cache, and rotate the queries, in one launch.

The launch is a row of tiles, each of ``BLOCK`` (token, head) vectors: first the keys, then the values, then the
queries. A tile rotates its vectors on the tensor cores with the rotation split into 16-bit terms (exact products,
float32 sums), so its result has float32 accuracy; everything after that stays in the registers of the threads that
own a vector.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import Copies, LayerCache, StoreSlots
from oscar_kernels.codec import clip_rank
from oscar_kernels.layout import CODEBOOK as CODEBOOK_CODING
from oscar_kernels.prepared import PreparedLayer, PreparedSide, SplitMatrix
from oscar_kernels.triton.arith import AFFINE, CODEBOOK, EXACT, code_bytes, exact_channels, narrow, param_bytes
from oscar_kernels.triton.dtypes import codebook_tensors, row_constants
from oscar_kernels.triton.nearest import store_nearest
from oscar_kernels.triton.padding import channel_mask, padded
from oscar_kernels.triton.quantize import clip, pack, pack_high, quantize, quantize_symmetric, stored_scale
from oscar_kernels.triton.rotate import (
    check_vectors,
    host_tile_count,
    rotate_tile,
    tile_count,
    tile_shape,
    vectors_of_tile,
    write_rotated,
)


@triton.jit
def _store_window(window_ptr, index_ptr, y, token, head, mask, HEADS: tl.constexpr, D: tl.constexpr):
    """Write vectors to a ring, a sink store or a copy where the token has a place in it."""
    index = tl.load(index_ptr + token, mask=mask, other=-1)
    rows = window_ptr + (index * HEADS + head) * D
    keep = channel_mask(mask & (index >= 0), D)
    at = rows[:, None] + tl.arange(0, padded(D))[None, :]
    tl.store(at, narrow(y, window_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _store_codes(
    rows, y, mask, head, gain, x_ptr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, CODING: tl.constexpr,
    GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, TERMS: tl.constexpr, RANK: tl.constexpr, FITTED: tl.constexpr,
    HAS_CENTER: tl.constexpr,
):  # fmt: skip
    """Clip and quantize vectors, and write them to rows of codes at byte pointers [BLOCK]."""
    # float32 has 13 bits of mantissa more than float16 and 16 more than bfloat16.
    ZERO_BITS: tl.constexpr = 0 if TERMS > 0 or HAS_CENTER else (13 if x_ptr.dtype.element_ty == tl.float16 else 16)
    clipped = clip(y, mask, RANK, ZERO_BITS)
    if CODING == AFFINE:
        code, broken, scale, zero = quantize(clipped, y, gain, BITS, GROUP, SCALE_DTYPE, FITTED)
    else:
        code, broken, scale = quantize_symmetric(clipped, y, gain, BITS, GROUP, SCALE_DTYPE, FITTED)
    CODE_BYTES: tl.constexpr = code_bytes(D, BITS)
    GROUPS: tl.constexpr = D // GROUP
    codes = rows + head * CODE_BYTES
    if BITS == 3:
        high = (code >= 4).to(tl.float32)
        at = codes[:, None] + D // 4 + tl.arange(0, padded(D // 8))[None, :]
        tl.store(at, pack_high(high, broken, D), mask=channel_mask(mask, D // 8))
        low = pack(code - 4 * high, broken, 2, D)
        at = codes[:, None] + tl.arange(0, padded(D // 4))[None, :]
        tl.store(at, low, mask=channel_mask(mask, D // 4))
    else:
        at = codes[:, None] + tl.arange(0, padded(CODE_BYTES))[None, :]
        tl.store(at, pack(code, broken, BITS, D), mask=channel_mask(mask, CODE_BYTES))
    params = rows + (HEADS * CODE_BYTES + head * param_bytes(GROUPS, SCALE_DTYPE, CODING))
    params = params.to(tl.pointer_type(SCALE_DTYPE), bitcast=True)
    group = tl.arange(0, padded(GROUPS))[None, :]
    exists = channel_mask(mask, GROUPS)
    if CODING == AFFINE:
        at = params[:, None] + 2 * group
        tl.store(at, scale, mask=exists)
        tl.store(at + 1, zero, mask=exists)
    else:
        tl.store(params[:, None] + group, scale, mask=exists)


@triton.jit
def _store_indices(
    rows, y, mask, head, gain, points_ptr, factor_ptr, HEADS: tl.constexpr, D: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, FITTED: tl.constexpr,
):  # fmt: skip
    """Find the nearest points of vectors, all of one head, and write them to rows at byte pointers [BLOCK]."""
    CODE_BYTES: tl.constexpr = D // 4
    codes = rows + head * CODE_BYTES
    scale = store_nearest(codes, y, mask, head, gain, points_ptr, factor_ptr, D, SCALE_DTYPE, FITTED)
    params = rows + (HEADS * CODE_BYTES + head * param_bytes(1, SCALE_DTYPE, CODEBOOK))
    at = params.to(tl.pointer_type(SCALE_DTYPE), bitcast=True)
    tl.store(at[:, None], stored_scale(scale, SCALE_DTYPE), mask=mask[:, None])


@triton.jit
def _store_tile(
    x_ptr, stride_token, stride_head, r_ptr, center_ptr, rows_ptr, row_stride, ring_ptr, sink_ptr,
    row_index_ptr, ring_index_ptr, sink_index_ptr, copy_ptr, copy_index_ptr, tile, tokens, gain, points_ptr, factor_ptr,
    HEADS: tl.constexpr, SETS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, CODING: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, R_SCALE: tl.constexpr, TERMS: tl.constexpr,
    RANK: tl.constexpr, FITTED: tl.constexpr, HAS_CENTER: tl.constexpr, HAS_RING: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_COPY: tl.constexpr, COPY_HEADS: tl.constexpr, BLOCK: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values: everything from rotation to the places it goes to."""
    # Heads that share a matrix may have points of their own, and then have tiles of their own.
    x_rows, mask, token, head, matrix = vectors_of_tile(
        x_ptr, stride_token, stride_head, tile, tokens, HEADS, HEADS if CODING == CODEBOOK else SETS, BLOCK
    )
    if SETS == 1:
        matrix = 0
    if BITS == EXACT and TERMS == 0:
        # Nothing is worked out: what is not finite stays in its channel.
        at = x_rows[:, None] + tl.arange(0, padded(D))[None, :]
        y = tl.load(at, mask=channel_mask(mask, D), other=0.0).to(tl.float32)
    else:
        y = rotate_tile(x_rows, mask, r_ptr + matrix * (TERMS * D * D), R_SCALE, TERMS, D, BLOCK, ALIKE)
    if HAS_CENTER:
        at = center_ptr + head[:, None] * D + tl.arange(0, padded(D))[None, :]
        if padded(D) == D:
            y = y - tl.load(at)
        else:
            y = y - tl.load(at, mask=(tl.arange(0, padded(D)) < D)[None, :], other=0.0)
    if HAS_RING:
        _store_window(ring_ptr, ring_index_ptr, y, token, head, mask, HEADS, D)
    if HAS_SINK:
        _store_window(sink_ptr, sink_index_ptr, y, token, head, mask, HEADS, D)
    if HAS_COPY:
        _store_window(copy_ptr, copy_index_ptr, y, token, head, mask, COPY_HEADS, D)
    rows = rows_ptr + tl.load(row_index_ptr + token, mask=mask, other=0) * row_stride
    if BITS == EXACT:
        at = exact_channels(rows, head, D, EXACT_DTYPE)[:, None] + tl.arange(0, padded(D))[None, :]
        tl.store(at, narrow(y, EXACT_DTYPE), mask=channel_mask(mask, D))
    elif CODING == CODEBOOK:
        _store_indices(rows, y, mask, head, gain, points_ptr, factor_ptr, HEADS, D, SCALE_DTYPE, FITTED)
    else:
        _store_codes(
            rows, y, mask, head, gain, x_ptr, HEADS, D, BITS, CODING, GROUP, SCALE_DTYPE, TERMS, RANK, FITTED,
            HAS_CENTER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "k_gain", "v_gain"])
def _store_kernel(
    k_ptr, k_stride_token, k_stride_head, v_ptr, v_stride_token, v_stride_head,
    q_ptr, q_stride_token, q_stride_head, q_out_ptr, k_center_ptr,
    k_rows_ptr, v_rows_ptr, k_row_stride, v_row_stride, k_ring_ptr, v_ring_ptr, k_sink_ptr, v_sink_ptr,
    row_index_ptr, ring_index_ptr, sink_index_ptr, k_copy_ptr, v_copy_ptr, copy_index_ptr, tokens,
    k_terms_ptr, v_terms_ptr, q_terms_ptr, k_gain, v_gain, k_points_ptr, k_factor_ptr,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_CODING: tl.constexpr, V_CODING: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr,
    K_SETS: tl.constexpr, V_SETS: tl.constexpr, Q_SETS: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, Q_SCALE: tl.constexpr,
    K_TERMS: tl.constexpr, V_TERMS: tl.constexpr, Q_TERMS: tl.constexpr,
    K_RANK: tl.constexpr, V_RANK: tl.constexpr, K_FITTED: tl.constexpr, V_FITTED: tl.constexpr,
    HAS_CENTER: tl.constexpr, HAS_RING: tl.constexpr, HAS_SINK: tl.constexpr, HAS_COPY: tl.constexpr,
    COPY_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles + value tiles + query tiles); Q_HEADS = 0 has no queries."""
    ALIKE: tl.constexpr = 2 if K_BITS == EXACT and V_BITS == EXACT else 1
    tile = tl.program_id(0)
    k_tiles = tile_count(tokens, HEADS, HEADS if K_CODING == CODEBOOK else K_SETS, BLOCK)
    kv_tiles = k_tiles + tile_count(tokens, HEADS, V_SETS, BLOCK)
    if tile >= kv_tiles:
        if Q_HEADS > 0:
            write_rotated(
                q_ptr, q_stride_token, q_stride_head, q_out_ptr, q_terms_ptr, tile - kv_tiles, tokens, Q_HEADS, Q_SETS,
                D, Q_SCALE, Q_TERMS, BLOCK,
            )  # fmt: skip
    elif tile < k_tiles:
        _store_tile(
            k_ptr, k_stride_token, k_stride_head, k_terms_ptr, k_center_ptr, k_rows_ptr, k_row_stride,
            k_ring_ptr, k_sink_ptr, row_index_ptr, ring_index_ptr, sink_index_ptr, k_copy_ptr, copy_index_ptr, tile,
            tokens, k_gain, k_points_ptr, k_factor_ptr, HEADS, K_SETS, D, K_BITS, K_CODING, K_GROUP, SCALE_DTYPE,
            EXACT_DTYPE, K_SCALE, K_TERMS, K_RANK,
            K_FITTED, HAS_CENTER, HAS_RING, HAS_SINK, HAS_COPY, COPY_HEADS, BLOCK, ALIKE,
        )  # fmt: skip
    else:
        _store_tile(
            v_ptr, v_stride_token, v_stride_head, v_terms_ptr, v_terms_ptr, v_rows_ptr, v_row_stride,
            v_ring_ptr, v_sink_ptr, row_index_ptr, ring_index_ptr, sink_index_ptr, v_copy_ptr, copy_index_ptr,
            tile - k_tiles, tokens, v_gain, k_points_ptr, k_factor_ptr, HEADS, V_SETS, V_D, V_BITS, V_CODING, V_GROUP,
            SCALE_DTYPE, EXACT_DTYPE, V_SCALE,
            V_TERMS, V_RANK, V_FITTED, False, HAS_RING, HAS_SINK, HAS_COPY, COPY_HEADS, BLOCK, ALIKE,
        )  # fmt: skip


def store(
    cache: LayerCache,
    slots: StoreSlots,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: PreparedLayer,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    copies: Copies | None = None,
) -> torch.Tensor | None:
    """Write new tokens to the history pool, the ring and the sink store; rotate the queries in the same launch.

    Args:
        cache: the layer's cache, written in place; every window is contiguous, both sides have scales of one
            dtype.
        slots: destination of every token.
        k, v: [tokens, kv_heads, head_dim of keys or of values], bfloat16 or float16; keys after RoPE. Any stride
            between tokens and between heads, so slices of a fused projection need no copy.
        layer: from :func:`oscar_kernels.prepared.prepare`; without a value matrix where values come multiplied.
        q: [tokens, q_heads, head_dim] of the dtype of ``k``, to be rotated.
        q_out: where to; allocated where None.
        copies: where keys and values go as well, in 16 bits and in the basis of the cache.

    Returns:
        the rotated queries in the dtype of ``q``; None without ``q``.

    Raises:
        ValueError: shapes, dtypes or row layouts do not fit.
    """
    layer.check(cache)
    for name, x, channels in (("k", k, cache.head_dim), ("v", v, cache.value_head_dim)):
        check_vectors(name, x, cache.kv_heads, channels, k.dtype)
    tokens, heads, head_dim = k.shape
    q_heads = 0 if q is None else q.shape[1]
    if q is not None:
        check_vectors("q", q, None, head_dim, k.dtype)
        q_out = q.new_empty(q.shape) if q_out is None else q_out
        if not q_out.is_contiguous():
            raise ValueError("q_out must be contiguous")
    if copies is not None:
        copies.check(tokens, cache)
    sides = _side("K", layer.key, heads, k) | _side("V", layer.value, heads, v)
    sides |= _terms("Q", None if q is None else layer.key.reading, q_heads, k)
    block, warps = tile_shape(tokens * (2 * heads + q_heads), max(head_dim, cache.value_head_dim))
    k_sets = heads if layer.key.coding == CODEBOOK_CODING else sides["K_SETS"]
    counts = ((heads, k_sets), (heads, sides["V_SETS"]), (q_heads, sides["Q_SETS"]))
    tiles = sum(host_tile_count(tokens, count, sets, block) for count, sets in counts)
    if tiles == 0:
        return q_out
    queries = (k, 0, 0, k) if q is None or q_out is None else (q, q.stride(0), q.stride(1), q_out)
    center = layer.key.center
    points, factor = codebook_tensors(layer.key.codebook, layer.key.coding, k)
    copied = (k, v, slots.row) if copies is None else (copies.k, copies.v, copies.rows)
    _store_kernel[(tiles,)](
        k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), *queries, k if center is None else center,
        cache.k_rows, cache.v_rows, cache.k_rows.stride(0), cache.v_rows.stride(0),
        cache.k_ring, cache.v_ring, cache.k_sink, cache.v_sink, slots.row, slots.ring, slots.sink, *copied,
        tokens, k_points_ptr=points, k_factor_ptr=factor, HEADS=heads, Q_HEADS=q_heads,
        **row_constants(cache), **sides,
        HAS_CENTER=center is not None, HAS_RING=cache.k_ring.numel() > 0, HAS_SINK=cache.k_sink.numel() > 0,
        HAS_COPY=copies is not None, COPY_HEADS=heads if copies is None else copies.k.stride(0) // head_dim,
        BLOCK=block, num_warps=warps,
        # A product that is not rounded before it is added to moves codes that lie on a boundary.
        enable_fp_fusion=False,
    )  # fmt: skip
    return q_out


def _terms(name: str, matrix: SplitMatrix | None, heads: int, x: torch.Tensor) -> dict[str, Any]:
    """What the kernel is told of a matrix; ``x`` stands in for terms that are not there."""
    if matrix is None:
        return {f"{name.lower()}_terms_ptr": x, f"{name}_SCALE": 1.0, f"{name}_TERMS": 0, f"{name}_SETS": 1}
    matrix.check(heads, x.dtype, arranged=False)
    return {
        f"{name.lower()}_terms_ptr": matrix.terms, f"{name}_SCALE": matrix.scale, f"{name}_TERMS": matrix.count,
        f"{name}_SETS": matrix.sets,
    }  # fmt: skip


def _side(name: str, side: PreparedSide, heads: int, x: torch.Tensor) -> dict[str, Any]:
    """What the kernel is told of keys or values."""
    return {
        **_terms(name, side.matrix, heads, x), f"{name.lower()}_gain": float(side.gain),
        f"{name}_RANK": clip_rank(x.shape[-1], side.clip), f"{name}_FITTED": side.gain > 0,
    }  # fmt: skip
