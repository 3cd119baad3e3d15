"""Arithmetic that all kernels share: tensor-core products, rounding, and codes as numbers without conversion.

Triton's interpreter, with which the kernels run on a machine without a GPU, truncates float32 to bfloat16 and
multiplies bfloat16 as if it were an integer. :func:`narrow` and :func:`dot` give the same result in both worlds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from oscar_kernels import layout

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
EXACT = tl.constexpr(layout.EXACT)
"""Bits of rows without codes."""
AFFINE = tl.constexpr(layout.AFFINE)
SYMMETRIC = tl.constexpr(layout.SYMMETRIC)
CODEBOOK = tl.constexpr(layout.CODEBOOK)
LOG2_E = tl.constexpr(1.4426950408889634)

CODES_PER_UNIT = tl.constexpr(2.0**24)
"""A code at bit 2j of an fp16 word is the subnormal number code * 4^j / CODES_PER_UNIT."""


@triton.constexpr_function
def plane_count(bits):
    """Planes of a head's codes: codes at the same bits of their bytes. Three-bit codes have those of their low bits.

    Numbers of 16 bits are one plane.
    """
    return {4: 2, 16: 1}.get(bits, 4)


@triton.constexpr_function
def code_bytes(head_dim, bits):
    """Bytes of a head's codes or numbers."""
    return head_dim * bits // 8


@triton.constexpr_function
def param_bytes(groups, dtype, coding):
    """Bytes of a head's scales, and zero points where it has any."""
    return groups * (2 if coding == layout.AFFINE else 1) * (dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def unit_size(head_dim, bits, group):
    """Channels of a *unit*: channels side by side that share a plane and a group.

    A quarter of a head at most, or the largest power of two that divides that, though the planes of four-bit codes hold
    half of one: from keys in units of half a head ptxas 12.8, which Triton 3.6 brings, makes wgmma descriptors with
    upper halves that nothing has set. Numbers of 16 bits have no groups.
    """
    largest = head_dim // 4 & -(head_dim // 4)
    return largest if bits == 16 else min(largest, group)


@triton.constexpr_function
def unit_start(unit, head_dim, bits, group):
    """First channel of a unit.

    Unit u holds the codes of plane u % planes in bytes (u // planes) * unit_size onwards of a head's codes.
    """
    planes = plane_count(bits)
    return (unit % planes) * (head_dim // planes) + (unit // planes) * unit_size(head_dim, bits, group)


@triton.constexpr_function
def unit_group(unit, head_dim, bits, group):
    """Group that the channels of a unit are in."""
    return unit_start(unit, head_dim, bits, group) // group


@triton.constexpr_function
def unit_weight(unit, bits, coding=layout.AFFINE):
    """What a unit's codes are multiplied by as :func:`unpack` gives them, 1 / CODES_PER_UNIT aside; 1 for points."""
    if coding == layout.CODEBOOK:
        return 1.0
    return 16.0 ** (unit % 2) if bits == 4 else 4.0 ** (unit % 4)


@triton.jit
def unit_channels(unit: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CODING: tl.constexpr):
    """Channels of a unit; unit j of a codebook, which has one group, holds channel j % 4 of every four."""
    UNIT: tl.constexpr = unit_size(D, BITS, GROUP)
    if CODING == CODEBOOK:
        return (unit // 4 * UNIT + tl.arange(0, UNIT)) * 4 + unit % 4
    else:
        return unit_start(unit, D, BITS, GROUP) + tl.arange(0, UNIT)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with 16-bit factors and float32 sums."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN whose mantissa is all ones would wrap around.
        rounded = tl.where(x != x, tl.full(x.shape, 0x7FC0, tl.uint32), rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def exp2(x):
    """2^x; results below 2^-126 are 0, which saves the scaling that keeps them."""
    if INTERPRET:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2(x):
    """log2 of a normal positive number, to about 2^-22."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x of a normal number, to one unit in the last place."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_codes(rows, span: tl.constexpr, byte, D: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Codes of the units that share bytes [span * UNIT, (span + 1) * UNIT) of a head, one fp16 tensor per plane.

    Args:
        rows: pointers to the head's codes, of a shape that broadcasts with ``byte``.
        byte: 0 .. UNIT - 1, along the axis of channels.

    Returns:
        see :func:`unpack`; three-bit codes as two-bit ones whose values go to 7.
    """
    at = span * UNIT + byte
    packed = tl.load(rows + at)
    if BITS == 2:
        return unpack(packed)
    elif BITS == 4:
        wide = packed.to(tl.uint16)
        return ((wide & 0x0F).to(tl.float16, bitcast=True), (wide & 0xF0).to(tl.float16, bitcast=True))
    else:
        # Moved down by one for every second four bytes, high bits lie where they continue the low ones, or, those of
        # the last plane, eight bits below that.
        high = tl.load(rows + (D // 4 + at // 8 * 4 + at % 4)).to(tl.uint16) >> (at // 4 % 2).to(tl.uint16)
        wide = packed.to(tl.uint16)
        return (
            (wide & 0x03 | high & 0x04).to(tl.float16, bitcast=True),
            (wide & 0x0C | high & 0x10).to(tl.float16, bitcast=True),
            (wide & 0x30 | high & 0x40).to(tl.float16, bitcast=True),
            (wide & 0xC0 | (high & 0x01) << 8).to(tl.float16, bitcast=True),
        )


@triton.jit
def unpack(packed):
    """Four bit planes, as fp16 subnormals, from bytes of four codes.

    Args:
        packed: uint8 of any shape; the code of plane j at bits 2j..2j+1.

    Returns:
        four fp16 tensors of the same shape; plane j holds code * 4^j * 2^-24. Tensor cores multiply subnormals
        exactly, so the codes are never shifted or converted: the caller takes 4^j out of the other factor, or out
        of the result, and 2^-24 out of the scale.
    """
    if INTERPRET:
        wide = packed.to(tl.uint16)
        return (
            (wide & 0x03).to(tl.float16, bitcast=True),
            (wide & 0x0C).to(tl.float16, bitcast=True),
            (wide & 0x30).to(tl.float16, bitcast=True),
            (wide & 0xC0).to(tl.float16, bitcast=True),
        )
    else:
        # Four bytes at a time: two byte permutes spread them over 16-bit halves, then one AND per two codes.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 lo, hi;
            prmt.b32 lo, $8, 0, 0x4140;
            prmt.b32 hi, $8, 0, 0x4342;
            and.b32 $0, lo, 0x00030003;
            and.b32 $1, hi, 0x00030003;
            and.b32 $2, lo, 0x000C000C;
            and.b32 $3, hi, 0x000C000C;
            and.b32 $4, lo, 0x00300030;
            and.b32 $5, hi, 0x00300030;
            and.b32 $6, lo, 0x00C000C0;
            and.b32 $7, hi, 0x00C000C0;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def point_channel(word, channel):
    """Number ``channel`` of points that are an int32 each."""
    return (word << (24 - 8 * channel)) >> 24


@triton.jit
def load_points(rows, points, byte):
    """Points by their indices: four fp16 tensors, one per channel of a point.

    Args:
        rows: pointers to the head's indices, of a shape that broadcasts with ``byte``.
        points: int32 pointers to the head's points, likewise.
        byte: some of 0 .. D / 4 - 1, along the axis of channels.
    """
    index = tl.load(rows + byte).to(tl.int32)
    # A whole number n from -128 to 127 is the fp16 number whose bits are 0x6400 + n + 128, less 1152: no conversion.
    word = tl.load(points + byte * 256 + index) ^ -0x7F7F7F80
    channels = ()
    for j in tl.static_range(4):
        near = ((word >> (8 * j)) & 0xFF | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
        channels = channels + (near - tl.full([], 1152.0, tl.float16),)
    return channels


@triton.jit
def exact_channels(rows, head, D: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to the first channel of a head in rows of 16 bits at byte pointers, which broadcast with ``head``."""
    return rows.to(tl.pointer_type(DTYPE), bitcast=True) + head * D


@triton.jit
def load_params(
    params_ptrs, GROUPS: tl.constexpr, SCALE_DTYPE: tl.constexpr, BITS: tl.constexpr, CODING: tl.constexpr
):  # fmt: skip
    """Scales and zero points that begin at byte pointers: two tuples of GROUPS float32 tensors of that shape.

    Symmetric codes have a zero point in the middle of their levels, or NaN with the scale; points have 0.
    """
    scales = ()
    zeros = ()
    if CODING != AFFINE:
        middle: tl.constexpr = 0.5 * ((1 << BITS) - 1) if CODING == SYMMETRIC else 0.0
        at = params_ptrs.to(tl.pointer_type(SCALE_DTYPE), bitcast=True)
        for g in tl.static_range(GROUPS):
            scale = tl.load(at + g).to(tl.float32)
            scales = scales + (scale,)
            zeros = zeros + (tl.where(scale == scale, middle, scale),)
    elif SCALE_DTYPE == tl.float32:
        at = params_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
        for g in tl.static_range(GROUPS):
            scales = scales + (tl.load(at + 2 * g),)
            zeros = zeros + (tl.load(at + 2 * g + 1),)
    else:
        # Both 16-bit numbers in one load, wide enough to be copied asynchronously.
        at = params_ptrs.to(tl.pointer_type(tl.uint32), bitcast=True)
        for g in tl.static_range(GROUPS):
            word = tl.load(at + g)
            if SCALE_DTYPE == tl.bfloat16:
                scales = scales + ((word << 16).to(tl.float32, bitcast=True),)
                zeros = zeros + ((word & 0xFFFF0000).to(tl.float32, bitcast=True),)
            else:
                scales = scales + (word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),)
                zeros = zeros + ((word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),)
    return scales, zeros
