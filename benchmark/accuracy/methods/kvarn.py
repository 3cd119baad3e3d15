"""KVarN: a Hadamard rotation, then tiles of tokens and channels whose variances are made equal along both axes."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.attention import Schedule
from accuracy.calibration import Calibration
from accuracy.methods.base import Method
from accuracy.methods.kivi import blocks_exact_from, per_channel
from accuracy.quantizers import SIXTEEN
from oscar_rotation.math.hadamard import sylvester_hadamard

TILE, SINK_TOKENS, ROUNDS = 128, 128, 16
"""Tokens of a tile, first tokens in 16 bits, rounds of normalization: the defaults of the authors' program."""

SMALLEST_STD, LARGEST_STD = 1e-3, 1e3
SMALLEST_SCALE, LARGEST_SCALE = -0.3, 10.0
"""Bounds of a deviation that is divided by, and of the natural logarithm of a scale."""


def deviation(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation with n - 1 along ``dim``, which is kept; several times as fast on a CPU as torch's own."""
    squares = (x - x.mean(dim, keepdim=True)).square_().sum(dim, keepdim=True)
    return (squares / (x.shape[dim] - 1)).sqrt_()


def normalized(tiles: torch.Tensor, order: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales with which standard deviations are about the same in every row and in every column.

    Rows and columns are divided by their standard deviations in turn. Kept are the scales of the round with the least
    imbalance, the largest deviation over the smallest, summed over both axes; none if no round beats the tile itself.
    A tile whose deviations are all far below 1 stays as it is: scales are bounded from below.

    Args:
        tiles: float32 [..., tokens, channels].
        order: axes along which deviations are taken, the first one first: -1 divides tokens, -2 channels.

    Returns:
        scales of tokens [..., tokens, 1] and of channels [..., 1, channels]; ``tiles`` is divided by both.
    """

    def deviations(x: torch.Tensor) -> dict[int, torch.Tensor]:
        return {dim: deviation(x, dim) for dim in order}

    def imbalance(of: dict[int, torch.Tensor]) -> torch.Tensor:
        first, second = (
            s.amax((-2, -1), keepdim=True) / s.amin((-2, -1), keepdim=True).clamp_min(1e-8) for s in of.values()
        )
        return first + second

    logs = {-1: torch.zeros_like(tiles[..., :1]), -2: torch.zeros_like(tiles[..., :1, :])}
    now, spread = tiles, deviations(tiles)
    least, best = imbalance(spread), dict(logs)
    for _ in range(ROUNDS):
        for dim in order:
            found = spread[dim] if dim == order[0] else deviation(now, dim)
            step = found.clamp(SMALLEST_STD, LARGEST_STD).log()
            logs[dim] = (logs[dim] + step).clamp(SMALLEST_SCALE, LARGEST_SCALE)
            now = tiles * (-logs[-1]).exp() * (-logs[-2]).exp()
        spread = deviations(now)
        unequal = imbalance(spread)
        better = unequal <= least
        least = torch.where(better, unequal, least)
        best = {dim: torch.where(better, logs[dim], best[dim]) for dim in best}
    return best[-1].exp(), best[-2].exp()


def coded(tiles: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Round to nearest within a normalized tile.

    Args:
        tiles: float32 [..., tokens, channels].
        bits: of a code.
        dim: along which numbers share scale and zero point: -2 for keys, which leaves one of each per channel, -1 for
            values, one per token. The normalization's scale of that axis is folded into them; all are float16.

    Returns:
        float32 of the shape of ``tiles``.
    """
    tokens, channels = normalized(tiles, (-3 - dim, dim))
    folded, other = (channels, tokens) if dim == -2 else (tokens, channels)
    balanced = tiles / tokens / channels
    low = balanced.amin(dim, keepdim=True)
    step = ((balanced.amax(dim, keepdim=True) - low) / (2**bits - 1)).clamp_min(1e-10)
    codes = ((balanced - low) / step).round().clamp(0, 2**bits - 1)
    scale, zero, rest = (x.half().float() for x in (folded * step, folded * low, other))
    return (codes * scale + zero) * rest


class Kvarn(Method):
    """Keys per channel and values per token of tiles of 128 tokens, behind a Hadamard matrix over the channels.

    K4V2 is the setting that its authors ship, K2V2 what its paper calls 2 bits. Assumed: a tile is rounded when it is
    full, and until then its tokens are in 16 bits; so are the first 128 of a request; no layer is left out.
    """

    source = "Muller et al. 2026 (arXiv 2606.03458), with the defaults of github.com/huawei-csl/KVarN"
    sink, recent = SINK_TOKENS, TILE

    def __init__(self, key_bits: int, value_bits: int) -> None:
        self.key_bits, self.value_bits = key_bits, value_bits
        self.name = f"KVarN K{key_bits}V{value_bits}"

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        self.rotation = sylvester_hadamard(calibration.head_dim).float().to(calibration.device)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        quantizer = partial(coded, bits=self.key_bits, dim=-2)
        return per_channel(k.float() @ self.rotation, self.sink, TILE, quantizer) @ self.rotation

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        quantizer = partial(coded, bits=self.value_bits, dim=-1)
        return per_channel(v.float() @ self.rotation, self.sink, TILE, quantizer) @ self.rotation

    def exact_from(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Method`."""
        whole = blocks_exact_from(schedule, self.sink, TILE)
        return whole, whole

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Codes; scale and zero point per channel of a tile and a scale per token, or the other way round."""
        per_tile, per_token = SIXTEEN / TILE, SIXTEEN / head_dim
        return self.key_bits + 2 * per_tile + per_token, self.value_bits + per_tile + 2 * per_token


METHODS = [partial(Kvarn, 4, 2), partial(Kvarn, 2, 2)]
