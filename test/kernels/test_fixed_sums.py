"""The arithmetic of values_fixed.cuh written out in NumPy: what a warp of the CUDA decode kernel sums up.

The kernel itself needs a GPU (test_cuda_decode.py); here its rounding, its units and its guard against overflow are
judged over as many positions as one block may ever get. Constants are read from the source.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest

from oscar_kernels.cuda.jit import SOURCES

TILE, BYTES = 32, 4
MASKS = np.array([0xFF, 0xFC, 0xF0, 0xC0], dtype=np.uint8)


def constant(name: str) -> int:
    """An integer constant of values_fixed.cuh."""
    found = re.search(rf"static constexpr \w+ {name} = ([^;]+);", (SOURCES / "values_fixed.cuh").read_text())
    assert found, name
    left, _, shift = found[1].partition("<<")
    return int(left, 0) << int(shift or 0)


@dataclass
class Heads:
    """Requests of one length: logits [heads, tokens] in log2, value scales and zero points, packed codes."""

    logits: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    packed: np.ndarray  # uint8 [heads, tokens, BYTES]

    def exact(self) -> np.ndarray:
        """float64 [heads, 4, BYTES]."""
        weights = np.exp2(self.logits.astype(np.float64) - self.logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        codes = np.stack([(self.packed >> 2 * plane) & 3 for plane in range(4)], 1).astype(np.float64)
        out = np.einsum("ht,hptb->hpb", weights * self.scale, codes)
        return out - (weights * self.scale * self.zero).sum(1)[:, None, None]


@dataclass
class Sums:
    """What a warp found: outputs [heads, 4, BYTES], how often a head made room, the largest integer sum."""

    out: np.ndarray
    made_room: np.ndarray
    largest: int


def fixed_sums(heads: Heads) -> Sums:
    """As the kernel sums: float32 where it has float32, integers where it has integers."""
    f32, f64 = np.float32, np.float64
    peak, step = f32(constant("PEAK")), constant("PHASE_STEP")
    looks, full = constant("RUN_STAGES"), constant("FULL")
    count, tokens = heads.logits.shape
    top, factor = np.full(count, -1e30, f32), np.full(count, 1e30, f32)
    total, shift = np.zeros((count, 8), f32), np.zeros((count, 8), f32)
    sums = np.zeros((count, 2, 4 * BYTES), np.int64)
    made_room, largest_sum, phase = np.zeros(count, int), 0, 0
    row = np.arange(8)
    reversed_bits = (row & 1) * 4 + (row & 2) + (row & 4) // 4
    base = (reversed_bits[:, None] * 4 + np.array([0, 2, 1, 3])) / 32

    def shrink(chosen: np.ndarray, ratio: np.ndarray) -> None:
        sums[chosen] = np.rint(sums[chosen].astype(f32).astype(f64) * ratio[chosen, None, None])

    for tile in range(tokens // TILE):
        now = slice(tile * TILE, (tile + 1) * TILE)
        # Token of eight, then which of a lane's four tokens.
        logits, scale, zero = (
            x[:, now].reshape(count, 4, 8).swapaxes(1, 2) for x in (heads.logits, heads.scale, heads.zero)
        )
        offset = base + (phase >> 14) / 2**23
        for raised in (False, True):
            with np.errstate(over="ignore", invalid="ignore"):
                weights = np.exp2(logits - top[:, None, None])
                numbers = np.floor((weights * scale * factor[:, None, None] + offset).astype(f32))
            if raised or (numbers < 65536).all():
                break
            new_top = np.maximum(top, logits.max((1, 2)))
            fade, top, old = np.exp2(top - new_top), new_top, factor
            total, shift = total * fade[:, None], shift * fade[:, None]
            largest = (np.exp2(logits - top[:, None, None]) * scale).max((1, 2))
            with np.errstate(divide="ignore", over="ignore"):
                factor = np.minimum(peak / np.maximum(largest, f32(1e-30)), old / fade)
            shrink(np.ones(count, bool), fade * (factor / old))
        total += weights.sum(2, dtype=f32)
        shift += (weights * scale * zero).sum(2, dtype=f32)
        numbers = numbers.swapaxes(1, 2).reshape(count, 1, TILE).astype(np.int64)
        columns = np.concatenate([numbers >> 8, numbers & 255], 1).astype(f64)
        prefixes = (heads.packed[:, now, None] & MASKS[:, None]).reshape(count, TILE, 4 * BYTES)
        sums += (columns @ prefixes).astype(np.int64)
        phase = (phase + step) % 2**32
        largest_sum = max(largest_sum, int(sums.max()))
        if tile % looks == looks - 1:
            over = sums.max((1, 2)) >= full
            top[over] += 1
            total[over] *= f32(0.5)
            shift[over] *= f32(0.5)
            shrink(over, np.full(count, 0.5))
            made_room += over
    by_plane = sums.reshape(count, 2, 4, BYTES).astype(f64)
    by_plane[:, :, :3] -= by_plane[:, :, 1:].copy()
    units = np.array([256, 1])[:, None, None] / 4.0 ** np.arange(4)[:, None]
    out = (by_plane * units).sum(1) / factor[:, None, None].astype(f64) - shift.sum(1, dtype=f64)[:, None, None]
    return Sums(out / total.sum(1, dtype=f64)[:, None, None], made_room, largest_sum)


def random_heads(tokens: int, spreads: list[float], peaks: list[int | None], scale_spread: float = 0.0) -> Heads:
    """Every spread of logits (standard deviation, nats) with every place of a token as heavy as all others together.

    Values of the later half have another mean, so a sum that loses its past, or its present, is noticed.
    """
    generator = np.random.default_rng(0)
    count = len(spreads) * len(peaks)
    logits = generator.standard_normal((count, tokens), dtype=np.float32)
    for head in range(count):
        spread, place = spreads[head % len(spreads)], peaks[head // len(spreads)]
        logits[head] *= spread / math.log(2)
        if place is not None:
            logits[head, place] = math.log2(tokens) + spread**2 / 2 / math.log(2)
    scale = 0.5 * np.exp(scale_spread * generator.standard_normal((count, tokens), dtype=np.float32))
    zero = (1.5 + 0.3 * generator.standard_normal((count, tokens))).astype(np.float32)
    zero[:, tokens // 2 :] -= 1
    packed = generator.integers(0, 256, (count, tokens, BYTES), dtype=np.uint8)
    return Heads(logits, scale, zero, packed)


def errors(heads: Heads, found: Sums) -> np.ndarray:
    exact = heads.exact()
    return np.linalg.norm((found.out - exact).reshape(len(exact), -1), axis=1) / np.linalg.norm(
        exact.reshape(len(exact), -1), axis=1
    )


@pytest.mark.parametrize("tokens", [16_384, 131_072, 524_288])
def test_errors_do_not_grow_with_the_length(tokens: int) -> None:
    """A bit more than bfloat16 outputs lose, at every length, spread and place of a peak; and no sum overflows."""
    heads = random_heads(tokens, [0.3, 1.0, 3.0], [None, 5, tokens - 5])
    found = fixed_sums(heads)
    assert errors(heads, found).max() < 0.01, errors(heads, found)
    assert found.largest < 2**31
    # The flat head without a peak has to make room, on long requests; those led by a peak never.
    assert (found.made_room[0] > 0) == (tokens > 100_000)
    assert (found.made_room[3:6] == 0).all()


def test_weights_below_the_finest_offset_count() -> None:
    """A peak first, and a hundred thousand tokens of 1/200 of a unit each: together they weigh 2% of the peak."""
    heads = random_heads(131_072, [0.0], [5])
    heads.logits[0, 5] = math.log2(200 * constant("PEAK"))
    heads.zero[0, 5] = -40
    exact = heads.exact()
    codes = np.stack([heads.packed[0, 5] >> 2 * plane & 3 for plane in range(4)])
    peak_alone = heads.scale[0, 5] * (codes + 40.0)
    assert np.abs(fixed_sums(heads).out - exact).max() < 0.2 * np.abs(peak_alone - exact).max()


def test_values_of_large_scale_cost_no_resolution() -> None:
    """Scales over two orders of magnitude, a peak that comes after most of them."""
    heads = random_heads(16_384, [1.0, 3.0], [None, 5, 16_379], scale_spread=1.5)
    found = fixed_sums(heads)
    assert errors(heads, found).max() < 0.01, errors(heads, found)


def test_sums_cannot_overflow_between_two_looks() -> None:
    """The largest numbers there are, for as long as it takes."""
    tokens = 4 * TILE * constant("RUN_STAGES")
    heads = random_heads(tokens, [0.0], [None])
    heads.logits[:] = 0
    heads.logits[:, TILE:] = 0.999
    heads.packed[:] = 255
    heads.scale[:], heads.zero[:] = 1, 0
    found = fixed_sums(heads)
    assert constant("FULL") < found.largest < 2**31
    assert constant("FULL") + constant("RUN_STAGES") * TILE * 255 * 255 < 2**31
    assert errors(heads, found).max() < 1e-4
