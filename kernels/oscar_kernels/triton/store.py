"""Store: rotate, clip, quantize and pack new tokens into the cache, and rotate the queries, in one launch.

The launch is a row of tiles, each of ``BLOCK`` (token, head) vectors: first the keys, then the values, then the
queries. A tile rotates its vectors on the tensor cores with the rotation split into 16-bit terms (exact products,
float32 sums), so its result has float32 accuracy; everything after that stays in the registers of the threads that
own a vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import LayerCache, StoreSlots
from oscar_kernels.codec import STRETCH as CODEC_STRETCH
from oscar_kernels.codec import clip_rank
from oscar_kernels.triton.arith import dot, narrow

# float16 terms of a rotation are kept times a power of two, so that their low parts are no subnormals: this one, or as
# much less as keeps the largest entry at FP16_LARGEST_TERM at most.
FP16_TERM_SCALE = 4096.0
FP16_LARGEST_TERM = 32768.0
STRETCH = tl.constexpr(CODEC_STRETCH)
TERMS = {torch.bfloat16: 3, torch.float16: 2}
"""16-bit terms that together hold a float32 rotation: 3 x 8 or 2 x 11 bits of mantissa."""


@dataclass(frozen=True)
class Rotation:
    """A rotation split for the tensor cores: ``terms`` [n, head_dim, head_dim] sum to ``scale`` x the rotation."""

    terms: torch.Tensor
    scale: float


def prepare_rotation(rotation: torch.Tensor | None, dtype: torch.dtype) -> Rotation | None:
    """Split a rotation once, for vectors of ``dtype``.

    Args:
        rotation: float32 [head_dim, head_dim] on the device of the cache, or None for identity.
        dtype: dtype of the vectors that it will rotate, bfloat16 or float16.

    Raises:
        ValueError: another dtype, or a matrix that is not finite.
    """
    if rotation is None:
        return None
    if dtype not in TERMS:
        raise ValueError(f"keys, values and queries must be bfloat16 or float16, got {dtype}")
    largest = float(rotation.abs().max())
    if not math.isfinite(largest):
        raise ValueError("a rotation must be finite")
    scale = 1.0
    if dtype == torch.float16:
        # frexp: largest is below 2^exponent.
        scale = min(FP16_TERM_SCALE, FP16_LARGEST_TERM / 2.0 ** math.frexp(largest)[1])
    rest = rotation.double() * scale
    terms = []
    for _ in range(TERMS[dtype]):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1].double()
    return Rotation(torch.stack(terms).contiguous(), scale)


@triton.jit
def _vectors(x_ptr, stride_token, stride_head, first, count, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Row pointers, mask, token and head of a tile of (token, head) vectors."""
    vector = first + tl.arange(0, BLOCK)
    token = (vector // HEADS).to(tl.int64)
    head = vector % HEADS
    return x_ptr + token * stride_token + head * stride_head, vector < count, token, head


@triton.jit
def _rotate(x_rows, mask, r_ptr, R_SCALE: tl.constexpr, TERMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK, D]: the vectors times the rotation; TERMS = 0 is identity.

    Identity is a product with the unit matrix, which is exact: so every tile leaves the tensor cores with its vectors
    spread over few threads, where what follows is cheap.
    """
    DEPTH: tl.constexpr = 64
    STEPS: tl.constexpr = D // DEPTH
    channel = tl.arange(0, D)
    y = tl.zeros([BLOCK, D], tl.float32)
    if TERMS == 0:
        for step in tl.static_range(STEPS):
            row = step * DEPTH + tl.arange(0, DEPTH)
            x = tl.load(x_rows[:, None] + row[None, :], mask=mask[:, None], other=0.0)
            y = dot(x, (row[:, None] == channel[None, :]).to(tl.float32).to(x.dtype), y)
    else:
        # Small terms first. All loads of a short loop are in flight at once.
        for step in tl.range(0, TERMS * STEPS, num_stages=4):
            row = step % STEPS * DEPTH + tl.arange(0, DEPTH)
            x = tl.load(x_rows[:, None] + row[None, :], mask=mask[:, None], other=0.0)
            term = TERMS - 1 - step // STEPS
            r = tl.load(r_ptr + (term * D * D + row[:, None] * D + channel[None, :]))
            y = dot(x, r, y)
        y = y * (1.0 / R_SCALE)
    return y


@triton.jit
def _clip(y, mask, RANK: tl.constexpr, ZERO_BITS: tl.constexpr):
    """Clamp every vector to its RANK-th largest magnitude, duplicates counted; RANK = 0 does not clip.

    Exact, without sorting. Near the top, walk down the distinct magnitudes RANK - 1 times: that is the threshold
    unless some of them occur twice. Then, and for any other rank, bisect over the bits, which order non-negative
    floats as integers do. Vectors that were not rotated have their 16-bit precision, so equal magnitudes are common
    and the ZERO_BITS lowest bits need no search: they are bisected at once.
    """
    if RANK == 0:
        return y
    else:
        size = tl.abs(y)
        tau = tl.max(size, 1)
        search = True
        if RANK <= 16 and ZERO_BITS == 0:
            for _ in tl.range(RANK - 1):
                tau = tl.max(tl.where(size < tau[:, None], size, -1.0), 1)
            reached = tl.sum((size >= tau[:, None]).to(tl.int32), 1)
            # Masked rows are all zeros: no reason to search.
            search = tl.max(((reached != RANK) & mask).to(tl.int32), 0) > 0
        if search:
            bits = size.to(tl.int32, bitcast=True)
            found = tl.zeros([y.shape[0]], tl.int32)
            bit = tl.full([], 1 << 30, tl.int32)
            for _ in tl.range(31 - ZERO_BITS):
                trial = found | bit
                above = tl.sum((bits >= trial[:, None]).to(tl.int32), 1)
                found = tl.where(above >= RANK, trial, found)
                bit = bit >> 1
            tau = found.to(tl.float32, bitcast=True)
        return tl.minimum(tl.maximum(y, -tau[:, None]), tau[:, None])


@triton.jit
def _quantize(y, whole, gain, GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, FITTED: tl.constexpr):
    """Packed codes uint8 [BLOCK, D/4], scale and zero point [BLOCK, D/GROUP] in SCALE_DTYPE.

    ``y`` is ``whole`` clipped.
    """
    BLOCK: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    grouped = tl.reshape(y, [BLOCK, D // GROUP, GROUP])
    low = tl.min(grouped, 2)
    high = tl.max(grouped, 2)
    scale = tl.div_rn(tl.maximum(high - low, 1e-8), tl.full(low.shape, 3.0, tl.float32))
    if SCALE_DTYPE == tl.float16:
        # As in the codec: keep scale and zero = -low / scale within float16, and the scale normal.
        largest = tl.maximum(tl.abs(low), tl.abs(high))
        scale = tl.minimum(tl.maximum(tl.maximum(scale, largest * (1.0 / 32768)), 0.00006103515625), 65504.0)
    scale = narrow(scale, SCALE_DTYPE)
    wide_scale = scale.to(tl.float32)
    zero = narrow(tl.div_rn(-low, wide_scale), SCALE_DTYPE)
    inverse = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), wide_scale)
    code = tl.floor(grouped * inverse[:, :, None] + (zero.to(tl.float32) + 0.5)[:, :, None])
    code = tl.minimum(tl.maximum(code, 0.0), 3.0)
    # Code j * D/4 + b goes to bits 2j of byte b. The sum is exact in float32 and needs one conversion a byte.
    planes = tl.reshape(code, [BLOCK, 4, D // 4])
    weight = (1 << (2 * tl.arange(0, 4))).to(tl.float32)
    packed = tl.sum(planes * weight[None, :, None], 1)
    # Minima and maxima of a GPU pass over a NaN, so a vector that has one is looked for.
    broken = tl.max((whole != whole).to(tl.int32), 1) > 0
    packed = tl.where(broken[:, None], 0.0, packed)
    if FITTED:
        # Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
        middle = 0.5 * (low + high)
        rest = tl.reshape(whole, [BLOCK, D // GROUP, GROUP]) - middle[:, :, None]
        mean = tl.sum(rest, 2) * (1.0 / GROUP)
        mean_code = tl.sum(code, 2) * (1.0 / GROUP)
        rest = rest - mean[:, :, None]
        along = tl.sum((code - mean_code[:, :, None]) * rest, 2)
        positive = along > 0
        fitted = tl.div_rn(gain * tl.sum(rest * rest, 2), tl.where(positive, along, 1.0))
        fitted = tl.where(positive, fitted, wide_scale)
        fitted = tl.minimum(tl.maximum(fitted, wide_scale * (1.0 / STRETCH)), wide_scale * STRETCH)
        if SCALE_DTYPE == tl.float16:
            fitted = tl.minimum(tl.maximum(fitted, 0.00006103515625), 65504.0)
        scale = narrow(fitted, SCALE_DTYPE)
        zero = narrow(mean_code - tl.div_rn(middle + mean, scale.to(tl.float32)), SCALE_DTYPE)
    nan = narrow(tl.full(low.shape, float("nan"), tl.float32), SCALE_DTYPE)
    scale = tl.where(broken[:, None], nan, scale)
    zero = tl.where(broken[:, None], nan, zero)
    return packed.to(tl.int32).to(tl.uint8), scale, zero


@triton.jit
def _store_window(window_ptr, index_ptr, y, token, head, mask, HEADS: tl.constexpr):
    """Write vectors to a ring or sink store where the token has a place in it."""
    D: tl.constexpr = y.shape[1]
    index = tl.load(index_ptr + token, mask=mask, other=-1)
    rows = window_ptr + (index * HEADS + head) * D
    keep = mask & (index >= 0)
    tl.store(rows[:, None] + tl.arange(0, D)[None, :], narrow(y, window_ptr.dtype.element_ty), mask=keep[:, None])


@triton.jit
def _store_tile(
    x_ptr, stride_token, stride_head, r_ptr, center_ptr, rows_ptr, row_stride, ring_ptr, sink_ptr,
    row_index_ptr, ring_index_ptr, sink_index_ptr, first, count, gain,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, R_SCALE: tl.constexpr,
    TERMS: tl.constexpr, RANK: tl.constexpr, FITTED: tl.constexpr, HAS_CENTER: tl.constexpr, HAS_RING: tl.constexpr,
    HAS_SINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values: everything from rotation to the three destinations."""
    x_rows, mask, token, head = _vectors(x_ptr, stride_token, stride_head, first, count, HEADS, BLOCK)
    y = _rotate(x_rows, mask, r_ptr, R_SCALE, TERMS, D, BLOCK)
    if HAS_CENTER:
        y = y - tl.load(center_ptr + head[:, None] * D + tl.arange(0, D)[None, :])
    if HAS_RING:
        _store_window(ring_ptr, ring_index_ptr, y, token, head, mask, HEADS)
    if HAS_SINK:
        _store_window(sink_ptr, sink_index_ptr, y, token, head, mask, HEADS)
    # float32 has 13 bits of mantissa more than float16 and 16 more than bfloat16.
    ZERO_BITS: tl.constexpr = 0 if TERMS > 0 or HAS_CENTER else (13 if x_ptr.dtype.element_ty == tl.float16 else 16)
    packed, scale, zero = _quantize(_clip(y, mask, RANK, ZERO_BITS), y, gain, GROUP, SCALE_DTYPE, FITTED)
    CODE_BYTES: tl.constexpr = D // 4
    GROUPS: tl.constexpr = D // GROUP
    rows = rows_ptr + tl.load(row_index_ptr + token, mask=mask, other=0) * row_stride
    codes = rows + head * CODE_BYTES
    tl.store(codes[:, None] + tl.arange(0, CODE_BYTES)[None, :], packed, mask=mask[:, None])
    params = (rows + HEADS * CODE_BYTES).to(tl.pointer_type(SCALE_DTYPE), bitcast=True) + head * (2 * GROUPS)
    at = params[:, None] + 2 * tl.arange(0, GROUPS)[None, :]
    tl.store(at, scale, mask=mask[:, None])
    tl.store(at + 1, zero, mask=mask[:, None])


@triton.jit(do_not_specialize=["tokens", "k_gain", "v_gain"])
def _store_kernel(
    k_ptr, k_stride_token, k_stride_head, v_ptr, v_stride_token, v_stride_head,
    q_ptr, q_stride_token, q_stride_head, q_out_ptr, k_terms_ptr, v_terms_ptr, q_terms_ptr, k_center_ptr,
    k_rows_ptr, v_rows_ptr, k_row_stride, v_row_stride, k_ring_ptr, v_ring_ptr, k_sink_ptr, v_sink_ptr,
    row_index_ptr, ring_index_ptr, sink_index_ptr, tokens, k_gain, v_gain,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, Q_SCALE: tl.constexpr,
    K_TERMS: tl.constexpr, V_TERMS: tl.constexpr, Q_TERMS: tl.constexpr,
    K_RANK: tl.constexpr, V_RANK: tl.constexpr, K_FITTED: tl.constexpr, V_FITTED: tl.constexpr,
    HAS_CENTER: tl.constexpr, HAS_RING: tl.constexpr, HAS_SINK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles + value tiles + query tiles); HEADS = 0 has queries only, Q_HEADS = 0 none."""
    tile = tl.program_id(0)
    kv_tiles = tl.cdiv(tokens * HEADS, BLOCK)
    if tile >= 2 * kv_tiles:
        if Q_HEADS > 0:
            first = (tile - 2 * kv_tiles) * BLOCK
            x_rows, mask, token, head = _vectors(
                q_ptr, q_stride_token, q_stride_head, first, tokens * Q_HEADS, Q_HEADS, BLOCK
            )
            y = _rotate(x_rows, mask, q_terms_ptr, Q_SCALE, Q_TERMS, D, BLOCK)
            rows = q_out_ptr + (token * Q_HEADS + head) * D
            y = narrow(y, q_out_ptr.dtype.element_ty)
            tl.store(rows[:, None] + tl.arange(0, D)[None, :], y, mask=mask[:, None])
    elif HEADS > 0:
        if tile < kv_tiles:
            _store_tile(
                k_ptr, k_stride_token, k_stride_head, k_terms_ptr, k_center_ptr, k_rows_ptr, k_row_stride,
                k_ring_ptr, k_sink_ptr, row_index_ptr, ring_index_ptr, sink_index_ptr, tile * BLOCK, tokens * HEADS,
                k_gain, HEADS, D, GROUP, SCALE_DTYPE, K_SCALE, K_TERMS, K_RANK, K_FITTED, HAS_CENTER, HAS_RING,
                HAS_SINK, BLOCK,
            )  # fmt: skip
        else:
            _store_tile(
                v_ptr, v_stride_token, v_stride_head, v_terms_ptr, v_terms_ptr, v_rows_ptr, v_row_stride,
                v_ring_ptr, v_sink_ptr, row_index_ptr, ring_index_ptr, sink_index_ptr, (tile - kv_tiles) * BLOCK,
                tokens * HEADS, v_gain, HEADS, D, GROUP, SCALE_DTYPE, V_SCALE, V_TERMS, V_RANK, V_FITTED, False,
                HAS_RING, HAS_SINK, BLOCK,
            )  # fmt: skip


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _prepared(rotation: torch.Tensor | Rotation | None, dtype: torch.dtype) -> Rotation | None:
    return prepare_rotation(rotation, dtype) if isinstance(rotation, torch.Tensor) else rotation


def _tile_shape(vectors: int, head_dim: int) -> tuple[int, int]:
    """(vectors per tile, warps): small tiles spread a decode step over the GPU, large ones read R less often."""
    if head_dim == 256:
        return 64, 8
    return (64, 4) if vectors <= 16384 else (128, 8)


def _check_vectors(name: str, x: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
    if x.dim() != 3 or x.shape[2] != head_dim or x.stride(2) != 1:
        raise ValueError(f"{name} must be [tokens, heads, {head_dim}] with contiguous channels, got {tuple(x.shape)}")
    if x.dtype != dtype or dtype not in TERMS:
        raise ValueError(f"keys, values and queries must all be bfloat16 or all float16, got {name} of {x.dtype}")


def store(
    cache: LayerCache,
    slots: StoreSlots,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rotation: torch.Tensor | Rotation | None,
    v_rotation: torch.Tensor | Rotation | None,
    k_clip: float,
    v_clip: float,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    q_rotation: torch.Tensor | Rotation | None = None,
    k_gain: float = 0.0,
    v_gain: float = 0.0,
) -> torch.Tensor | None:
    """Write new tokens to the history pool, the ring and the sink store; rotate the queries in the same launch.

    Args:
        cache: the layer's cache, written in place; every window is contiguous.
        slots: destination of every token.
        k, v: [tokens, kv_heads, head_dim], bfloat16 or float16; keys after RoPE. Any stride between tokens and
            between heads, so slices of a fused projection need no copy.
        k_rotation, v_rotation: from :func:`prepare_rotation`; a float32 matrix is split on the spot (slow); None
            where the vectors come rotated already.
        k_clip, v_clip: clip ratios.
        q: [tokens, q_heads, head_dim] of the dtype of ``k``, to be rotated.
        q_out: where to; allocated where None.
        k_center: float32 [kv_heads, head_dim], contiguous, subtracted from the rotated keys; None for nothing.
        q_rotation: what queries are rotated with, where it is not ``k_rotation``: the inverse transpose of a key
            transform that is not orthogonal.
        k_gain, v_gain: of scales and zero points fitted to the codes, see
            :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps those of the range.

    Returns:
        the rotated queries in the dtype of ``q``; None without ``q``.
    """
    head_dim = cache.layout.head_dim
    for name, x in (("k", k), ("v", v)):
        _check_vectors(name, x, head_dim, k.dtype)
    if k_center is not None:
        wanted = (k.shape[1], head_dim)
        if k_center.dtype != torch.float32 or tuple(k_center.shape) != wanted or not k_center.is_contiguous():
            raise ValueError(
                f"k_center must be contiguous float32 {list(wanted)}, got {k_center.dtype} {list(k_center.shape)}"
            )
    keys = _prepared(k_rotation, k.dtype)
    queries = keys if q_rotation is None else _prepared(q_rotation, k.dtype)
    return _launch(cache, slots, k, v, keys, _prepared(v_rotation, k.dtype), queries, k_center, k_clip, v_clip,
                   q, q_out, k_gain, v_gain)  # fmt: skip


def rotate_queries(
    q: torch.Tensor, k_rotation: torch.Tensor | Rotation | None, q_out: torch.Tensor | None = None
) -> torch.Tensor:
    """The query rotation of :func:`store` alone: [tokens, q_heads, head_dim] -> the same, contiguous."""
    out = _launch(None, None, None, None, None, None, _prepared(k_rotation, q.dtype), None, 1.0, 1.0, q, q_out)
    assert out is not None
    return out


def _launch(
    cache: LayerCache | None,
    slots: StoreSlots | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_rotation: Rotation | None,
    v_rotation: Rotation | None,
    q_rotation: Rotation | None,
    k_center: torch.Tensor | None,
    k_clip: float,
    v_clip: float,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    k_gain: float = 0.0,
    v_gain: float = 0.0,
) -> torch.Tensor | None:
    some = k if k is not None else q
    assert some is not None
    tokens, _, head_dim = some.shape
    heads = 0 if k is None else k.shape[1]
    q_heads = 0 if q is None else q.shape[1]
    if q is not None:
        _check_vectors("q", q, head_dim, some.dtype)
        q_out = q.new_empty(q.shape) if q_out is None else q_out
        if not q_out.is_contiguous():
            raise ValueError("q_out must be contiguous")
    block, warps = _tile_shape(tokens * (2 * heads + q_heads), head_dim)
    tiles = 2 * triton.cdiv(tokens * heads, block) + triton.cdiv(tokens * q_heads, block)
    if tiles == 0:
        return q_out

    def strides(x: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
        return (some, 0, 0) if x is None else (x, x.stride(0), x.stride(1))

    if cache is None or slots is None:
        buffers = (some,) * 2 + (0, 0) + (some,) * 4 + (some,) * 3
        group, scale_dtype, windows = head_dim, torch.bfloat16, (False, False)
    else:
        buffers = (
            cache.k_rows, cache.v_rows, cache.k_rows.stride(0), cache.v_rows.stride(0),
            cache.k_ring, cache.v_ring, cache.k_sink, cache.v_sink, slots.row, slots.ring, slots.sink,
        )  # fmt: skip
        group, scale_dtype = cache.layout.group_size, cache.layout.scale_dtype
        windows = (cache.k_ring.numel() > 0, cache.k_sink.numel() > 0)
    _store_kernel[(tiles,)](
        *strides(k), *strides(v), *strides(q), some if q_out is None else q_out,
        some if k_rotation is None else k_rotation.terms, some if v_rotation is None else v_rotation.terms,
        some if q_rotation is None else q_rotation.terms, some if k_center is None else k_center, *buffers, tokens,
        float(k_gain), float(v_gain),
        HEADS=heads, Q_HEADS=q_heads, D=head_dim, GROUP=group, SCALE_DTYPE=TRITON_DTYPES[scale_dtype],
        K_SCALE=1.0 if k_rotation is None else k_rotation.scale,
        V_SCALE=1.0 if v_rotation is None else v_rotation.scale,
        Q_SCALE=1.0 if q_rotation is None else q_rotation.scale,
        K_TERMS=0 if k_rotation is None else k_rotation.terms.shape[0],
        V_TERMS=0 if v_rotation is None else v_rotation.terms.shape[0],
        Q_TERMS=0 if q_rotation is None else q_rotation.terms.shape[0],
        K_RANK=clip_rank(head_dim, k_clip), V_RANK=clip_rank(head_dim, v_clip),
        K_FITTED=k_gain > 0, V_FITTED=v_gain > 0,
        HAS_CENTER=k_center is not None, HAS_RING=windows[0], HAS_SINK=windows[1], BLOCK=block, num_warps=warps,
        # A product that is not rounded before it is added to moves codes that lie on a boundary.
        enable_fp_fusion=False,
    )  # fmt: skip
    return q_out
