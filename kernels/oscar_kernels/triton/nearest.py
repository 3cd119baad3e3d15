"""Vectors in registers to indices of the nearest points of their head's codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.scales import MIN_RANGE as CODEC_MIN_RANGE
from oscar_kernels.triton.arith import dot, point_channel
from oscar_kernels.triton.quantize import fitted

MIN_RANGE = tl.constexpr(CODEC_MIN_RANGE)
AT_ONCE = tl.constexpr(128)
"""Points whose scores are in registers at a time."""
FURTHEST = tl.constexpr(30000.0)
"""Channels of a vector in units of its points' whole numbers, at most: float16 holds them."""


@triton.jit
def _square(word):
    """Squared length of points that are an int32 each, times factor^-2."""
    total = point_channel(word, 0) * point_channel(word, 0)
    for j in tl.static_range(1, 4):
        total += point_channel(word, j) * point_channel(word, j)
    return total


@triton.jit
def store_nearest(
    codes, y, mask, head, gain, points_ptr, factor_ptr, D: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    FITTED: tl.constexpr,
):  # fmt: skip
    """Write the indices of vectors, all of one head, at byte pointers [BLOCK]; returns scales [BLOCK, 1].

    The nearest point p of x is the one with the largest x . p - |p|^2 / 2. That is one product of depth 16 of float16
    numbers: the channels' high and low parts, times the point's, and the two bytes of |p|^2, times constants.
    """
    BLOCK: tl.constexpr = y.shape[0]
    broken = tl.max((y != y).to(tl.int32), 1) > 0
    rms = tl.sqrt_rn(tl.sum(y * y, 1) * (1.0 / D))
    scale = tl.maximum(rms, MIN_RANGE)
    x = tl.where(broken[:, None], 0.0, y * tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), scale)[:, None])
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    channel = tl.arange(0, y.shape[1])[:, None]
    depth = tl.arange(0, 16)
    number = tl.arange(0, AT_ONCE)
    first = tl.max(head, 0) * (D // 4)
    along = tl.zeros([BLOCK], tl.float32)
    for b in tl.range(D // 4):
        factor = tl.load(factor_ptr + first + b)
        own = (channel == 4 * b + (depth % 4)[None, :]).to(tl.float32).to(tl.float16)
        # Every column has one channel: 0 to 3, four times over.
        own_x = dot(low, own, dot(high, own, tl.zeros([BLOCK, 16], tl.float32))) / factor
        own_x = tl.minimum(tl.maximum(own_x, -FURTHEST), FURTHEST)
        near = own_x.to(tl.float16).to(tl.float32)
        left = tl.where(depth < 4, near, tl.where(depth < 8, own_x - near, 0.0))
        left = tl.where(depth == 8, -128.0, tl.where(depth == 9, -0.5, left)).to(tl.float16)
        points = points_ptr + (first + b) * 256
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = tl.zeros([BLOCK], tl.int32)
        for begin in tl.static_range(0, 256, AT_ONCE):
            word = tl.load(points + begin + number)[None, :]
            square = _square(word)
            right = tl.where(depth[:, None] < 8, point_channel(word, (depth % 4)[:, None]), 0)
            right = tl.where(depth[:, None] == 8, square >> 8, tl.where(depth[:, None] == 9, square & 255, right))
            scores = dot(left, right.to(tl.float16), tl.zeros([BLOCK, AT_ONCE], tl.float32))
            most, at = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
            index = tl.where(most > best, begin + at, index)
            best = tl.maximum(best, most)
        tl.store(codes + b, tl.where(broken, 0, index).to(tl.uint8), mask=mask)
        if FITTED:
            word = tl.load(points + index)
            along += factor * factor * (best + 0.5 * _square(word).to(tl.float32))
    if FITTED:
        # In units of the scale: the numbers of the points are those of x.
        scale *= fitted(tl.sum(x * x, 1), along, tl.full([BLOCK], 1.0, tl.float32), gain)
    return tl.where(broken, float("nan"), scale)[:, None]
