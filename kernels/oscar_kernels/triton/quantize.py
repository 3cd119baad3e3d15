"""Vectors in registers to codes: clip, quantize, pack, as :mod:`oscar_kernels.codec` specifies."""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels import scales
from oscar_kernels.triton.arith import code_bytes, dot, narrow, plane_count
from oscar_kernels.triton.padding import padded

STRETCH = tl.constexpr(scales.STRETCH)
MIN_RANGE = tl.constexpr(scales.MIN_RANGE)


@triton.constexpr_function
def symmetric_step(bits):
    """Scale of symmetric codes relative to the rms of a group."""
    return scales.STEP[bits]


@triton.jit
def fitted(length, along, scale, gain):
    """The scale with which codes reach ``gain`` times what they stand for, within STRETCH of the one given.

    ``length`` is <y, y>, ``along`` <codes, y>.
    """
    positive = along > 0
    wanted = tl.div_rn(gain * length, tl.where(positive, along, 1.0))
    wanted = tl.where(positive, wanted, scale)
    return tl.minimum(tl.maximum(wanted, scale * (1.0 / STRETCH)), scale * STRETCH)


@triton.jit
def stored_scale(scale, SCALE_DTYPE: tl.constexpr):
    """Scales in their dtype, in float16 normal and finite."""
    if SCALE_DTYPE == tl.float16:
        scale = tl.minimum(tl.maximum(scale, 0.00006103515625), 65504.0)
    return narrow(scale, SCALE_DTYPE)


@triton.jit
def clip(y, mask, RANK: tl.constexpr, ZERO_BITS: tl.constexpr):
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
def pack(code, broken, BITS: tl.constexpr, D: tl.constexpr):
    """Bytes of codes float32 [BLOCK, padded(D)] below 2^BITS, BITS 2 or 4: uint8 [BLOCK, padded(D * BITS / 8)]; 0 where
    ``broken``."""
    BLOCK: tl.constexpr = code.shape[0]
    PLANES: tl.constexpr = plane_count(BITS)
    # The code of plane j goes to bits BITS * j of its byte. Exact in float32, and one conversion a byte.
    if padded(D) == D:
        weight = (1 << (BITS * tl.arange(0, PLANES))).to(tl.float32)
        packed = tl.sum(tl.reshape(code, [BLOCK, PLANES, D // PLANES]) * weight[None, :, None], 1)
    else:
        channel = tl.arange(0, padded(D))[:, None]
        byte = tl.arange(0, padded(code_bytes(D, BITS)))[None, :]
        own = (channel < D) & (channel % (D // PLANES) == byte)
        packed = gathered(code, tl.where(own, 1 << (BITS * (channel // (D // PLANES))), 0))
    return tl.where(broken[:, None], 0.0, packed).to(tl.int32).to(tl.uint8)


@triton.jit
def gathered(x, weight):
    """Bytes [BLOCK, bytes] of small whole numbers [BLOCK, channels] whose planes are no powers of two apart, by a
    product with int32 weights [channels, bytes] that float16 holds: exact."""
    of_byte = weight.to(tl.float32).to(tl.float16)
    return dot(x.to(tl.float16), of_byte, tl.zeros([x.shape[0], weight.shape[1]], tl.float32))


@triton.jit
def pack_high(high, broken, D: tl.constexpr):
    """Bytes of the high bits of three-bit codes, float32 [BLOCK, padded(D)] of 0 and 1: uint8 [BLOCK, padded(D/8)]."""
    BLOCK: tl.constexpr = high.shape[0]
    # Of plane j and half h to bit (2 j + 2) % 8 + h: oscar_kernels.layout.HIGH_BITS.
    if padded(D) == D:
        of_plane = (1 << ((2 * tl.arange(0, 4) + 2) % 8)).to(tl.float32)
        of_half = (1 + tl.arange(0, 2)).to(tl.float32)
        planes = tl.sum(tl.reshape(high, [BLOCK, 4, D // 4]) * of_plane[None, :, None], 1)
        packed = tl.sum(tl.reshape(planes, [BLOCK, D // 32, 2, 4]) * of_half[None, None, :, None], 2)
        packed = tl.reshape(packed, [BLOCK, D // 8])
    else:
        channel = tl.arange(0, padded(D))[:, None]
        low = channel % (D // 4)
        own = (channel < D) & (low // 8 * 4 + low % 4 == tl.arange(0, padded(D // 8))[None, :])
        packed = gathered(high, tl.where(own, 1 << ((2 * (channel // (D // 4)) + 2) % 8 + low // 4 % 2), 0))
    return tl.where(broken[:, None], 0.0, packed).to(tl.int32).to(tl.uint8)


@triton.jit
def quantize(
    y, whole, gain, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, FITTED: tl.constexpr
):  # fmt: skip
    """Codes float32 [BLOCK, D], which vectors have a NaN, scale and zero point [BLOCK, D/GROUP] in SCALE_DTYPE.

    ``y`` is ``whole`` clipped; of what it is padded with, groups of zeros, nobody reads the result.
    """
    STEPS: tl.constexpr = (1 << BITS) - 1
    BLOCK: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    grouped = tl.reshape(y, [BLOCK, D // GROUP, GROUP])
    low = tl.min(grouped, 2)
    high = tl.max(grouped, 2)
    scale = tl.div_rn(tl.maximum(high - low, 1e-8), tl.full(low.shape, STEPS, tl.float32))
    if SCALE_DTYPE == tl.float16:
        # As in the codec: keep scale and zero = -low / scale within float16, and the scale normal.
        largest = tl.maximum(tl.abs(low), tl.abs(high))
        scale = tl.maximum(scale, largest * (1.0 / 32768))
    scale = stored_scale(scale, SCALE_DTYPE)
    wide_scale = scale.to(tl.float32)
    zero = narrow(tl.div_rn(-low, wide_scale), SCALE_DTYPE)
    inverse = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), wide_scale)
    code = tl.floor(grouped * inverse[:, :, None] + (zero.to(tl.float32) + 0.5)[:, :, None])
    code = tl.minimum(tl.maximum(code, 0.0), STEPS)
    # Minima and maxima of a GPU pass over a NaN, so a vector that has one is looked for.
    broken = tl.max((whole != whole).to(tl.int32), 1) > 0
    if FITTED:
        # Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
        middle = 0.5 * (low + high)
        rest = tl.reshape(whole, [BLOCK, D // GROUP, GROUP]) - middle[:, :, None]
        mean = tl.sum(rest, 2) * (1.0 / GROUP)
        mean_code = tl.sum(code, 2) * (1.0 / GROUP)
        rest = rest - mean[:, :, None]
        along = tl.sum((code - mean_code[:, :, None]) * rest, 2)
        scale = stored_scale(fitted(tl.sum(rest * rest, 2), along, wide_scale, gain), SCALE_DTYPE)
        zero = narrow(mean_code - tl.div_rn(middle + mean, scale.to(tl.float32)), SCALE_DTYPE)
    nan = narrow(tl.full(low.shape, float("nan"), tl.float32), SCALE_DTYPE)
    scale = tl.where(broken[:, None], nan, scale)
    zero = tl.where(broken[:, None], nan, zero)
    return tl.reshape(code, [BLOCK, D]), broken, scale, zero


@triton.jit
def quantize_symmetric(
    y, whole, gain, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, FITTED: tl.constexpr
):  # fmt: skip
    """Codes float32 [BLOCK, D], which vectors have a NaN, and scale [BLOCK, D/GROUP] in SCALE_DTYPE; see
    :func:`quantize`.
    """
    LEVELS: tl.constexpr = 1 << BITS
    BLOCK: tl.constexpr = y.shape[0]
    D: tl.constexpr = y.shape[1]
    grouped = tl.reshape(y, [BLOCK, D // GROUP, GROUP])
    rms = tl.sqrt_rn(tl.sum(grouped * grouped, 2) * (1.0 / GROUP))
    scale = stored_scale(tl.maximum(rms * symmetric_step(BITS), MIN_RANGE), SCALE_DTYPE)
    wide_scale = scale.to(tl.float32)
    inverse = tl.div_rn(tl.full(rms.shape, 1.0, tl.float32), wide_scale)
    code = tl.floor(grouped * inverse[:, :, None] + 0.5 * LEVELS)
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS - 1)
    broken = tl.max((whole != whole).to(tl.int32), 1) > 0
    if FITTED:
        rest = tl.reshape(whole, [BLOCK, D // GROUP, GROUP])
        along = tl.sum((code - 0.5 * (LEVELS - 1)) * rest, 2)
        scale = stored_scale(fitted(tl.sum(rest * rest, 2), along, wide_scale, gain), SCALE_DTYPE)
    nan = narrow(tl.full(rms.shape, float("nan"), tl.float32), SCALE_DTYPE)
    return tl.reshape(code, [BLOCK, D]), broken, tl.where(broken[:, None], nan, scale)
