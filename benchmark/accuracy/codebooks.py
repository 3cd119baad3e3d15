"""Codebooks for pairs and fours of channels: 16 points in a plane, or 256 in four dimensions, are the same two bits per
channel as four levels each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from oscar_kernels.codec import STRETCH

POINTS, ROUNDS, EDGE, STEPS = 16, 120, 4.5, 161
"""Points of a codebook; rounds of Lloyd's algorithm; half the width of the grid that stands for a normal plane, and its
values along an axis."""

BLOCK_SCORES = 1 << 26
"""Products of rows and points at a time: 256 MB in float32."""


def nearest(pairs: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Index of the nearest point: pairs [..., 2], book [points, 2] -> int64 [...]."""
    # |x - p|^2 without |x|^2, which decides nothing.
    return (book.square().sum(1) - 2 * pairs @ book.T).argmin(-1)


def refined(book: torch.Tensor, samples: torch.Tensor, weights: torch.Tensor, rounds: int) -> torch.Tensor:
    """Lloyd's algorithm: every point moves to the mean of the samples that are nearest to it.

    Args:
        book: [points, 2], where to begin. A point that no sample is nearest to stays.
        samples: [n, 2].
        weights: [n], of the samples.
        rounds: how often.

    Returns:
        [points, 2].
    """
    for _ in range(rounds):
        index = nearest(samples, book)
        mass = torch.zeros_like(book[:, 0]).index_add_(0, index, weights)
        total = torch.zeros_like(book).index_add_(0, index, weights[:, None] * samples)
        book = torch.where(mass[:, None] > 0, total / mass[:, None].clamp_min(1e-30), book)
    return book


@cache
def gaussian_book() -> torch.Tensor:
    """The best 16 points for a standard normal pair that were found: one in the middle, six and nine around it.

    They leave .1075 of the variance as error; four levels per channel leave .1175 (Max 1960). Float64 [16, 2].
    """
    axis = torch.linspace(-EDGE, EDGE, STEPS, dtype=torch.float64)
    density = (-axis.square() / 2).exp()
    book = [torch.zeros(1, 2, dtype=torch.float64)]
    for count, radius, turn in ((6, 0.9, 0.1), (9, 1.9, 0.0)):
        angles = turn + 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        book.append(radius * torch.stack([angles.cos(), angles.sin()], 1))
    return refined(
        torch.cat(book), torch.cartesian_prod(axis, axis), torch.cartesian_prod(density, density).prod(1), ROUNDS
    )


@cache
def product_book(levels: tuple[float, ...]) -> torch.Tensor:
    """All pairs of ``levels``: the codebook that a scalar quantizer of each channel amounts to; float64 [n^2, 2]."""
    axis = torch.tensor(levels, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


@dataclass(frozen=True)
class GroupBooks:
    """A book for every kv head and every group of neighbouring channels.

    Attributes:
        points: float32 [heads, groups, points, channels].
    """

    points: torch.Tensor

    @property
    def bits(self) -> float:
        """Of an index, per channel."""
        return math.log2(self.points.shape[2]) / self.points.shape[3]

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Every group of channels replaced by the nearest point of its book: [heads, n, d] -> float32 of that shape."""
        out = torch.empty_like(x, dtype=torch.float32)
        for span, _, index in self._indices(x):
            chosen = self.points.flatten(0, 1).gather(1, index[..., None].expand(-1, -1, self.points.shape[3]))
            out[:, span] = chosen.unflatten(0, self.points.shape[:2]).transpose(1, 2).flatten(2)
        return out

    def refined(self, x: torch.Tensor, weights: torch.Tensor) -> GroupBooks:
        """Every point moved to the mean of the rows nearest to it; a point that nothing is near to stays.

        Args:
            x: [heads, n, d].
            weights: [heads, n], of the rows.
        """
        heads, groups, count, channels = self.points.shape
        total = torch.zeros(heads * groups * count, channels + 1, device=x.device)
        first = torch.arange(heads * groups, device=x.device)[:, None] * count
        for span, rows, index in self._indices(x):
            heavy = weights[:, None, span, None].expand(-1, groups, -1, 1).flatten(0, 1)
            sums = torch.cat([rows * heavy, heavy], -1)
            total.index_add_(0, (index + first).flatten(), sums.flatten(0, 1))
        mass = total[:, -1:]
        moved = torch.where(mass > 0, total[:, :-1] / mass.clamp_min(1e-30), self.points.reshape(-1, channels))
        return GroupBooks(moved.view_as(self.points))

    def rounded(self, dtype: torch.dtype) -> GroupBooks:
        """Points as a float8 ``dtype`` holds them, with a factor per book that maps its largest to the largest."""
        factor = self.points.abs().amax((-2, -1), keepdim=True).clamp_min(1e-12) / torch.finfo(dtype).max
        return GroupBooks((self.points / factor).to(dtype).float() * factor)

    def _indices(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Blocks of rows: their places, the rows [heads groups, rows, channels] and their points' numbers."""
        heads, groups, count, channels = self.points.shape
        books = self.points.flatten(0, 1)
        # |x - p|^2 without |x|^2, which decides nothing.
        half = -0.5 * books.square().sum(-1)[:, None]
        step = max(1, BLOCK_SCORES // (heads * groups * count))
        for begin in range(0, x.shape[1], step):
            span = slice(begin, min(begin + step, x.shape[1]))
            rows = x[:, span].float().unflatten(-1, (groups, channels)).transpose(1, 2).flatten(0, 1)
            yield span, rows, torch.baddbmm(half, rows, books.mT).argmax(-1)


def fitted_books(
    x: torch.Tensor, weights: torch.Tensor, channels: int, points: int, rounds: int, seed: int = 0
) -> GroupBooks:
    """k-means of every kv head and group, all of them together, from rows that are drawn by their weights.

    Args:
        x: float32 [heads, n, d].
        weights: [heads, n].
        channels: of a group.
        points: of a book.
        rounds: of Lloyd's algorithm.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = weights.double().cpu() + 1e-12
    drawn = torch.multinomial(chances, points, replacement=x.shape[1] < points, generator=generator).to(x.device)
    rows = x.gather(1, drawn[..., None].expand(-1, -1, x.shape[2]))
    books = GroupBooks(rows.unflatten(-1, (-1, channels)).transpose(1, 2).contiguous())
    for _ in range(rounds):
        books = books.refined(x, weights)
    return books


@cache
def gaussian_fours(points: int, samples: int = 40_000, rounds: int = 20) -> torch.Tensor:
    """Points for four standard normal channels, fitted to draws of them: float32 [points, 4]."""
    x = torch.randn(1, samples, 4, generator=torch.Generator().manual_seed(0))
    return fitted_books(x, torch.ones(1, samples), 4, points, rounds).points[0, 0]


def rms(y: torch.Tensor) -> torch.Tensor:
    """Root mean square of every row, [..., d] -> [..., 1]."""
    return y.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)


def read_rows(y: torch.Tensor, books: GroupBooks, gain: float, offset: bool = False) -> torch.Tensor:
    """Rows by the nearest points to them, with one scale per row in bfloat16.

    Args:
        y: [batch, heads, n, d], behind the transform.
        books: of rows over their root mean square, of rows less their mean with ``offset``.
        gain: part of its length along itself that a row is read with, as in ``plus``; 0 leaves the scale at the root
            mean square.
        offset: whether a row has an offset in bfloat16, too, with which what is read back has its mean.

    Returns:
        float32 of the shape of ``y``.
    """
    mean = y.mean(-1, keepdim=True) if offset else torch.zeros_like(y[..., :1])
    centered = y - mean
    scale = rms(centered)
    flat = (centered / scale).transpose(0, 1).flatten(1, 2)
    points = books.nearest(flat).unflatten(1, (y.shape[0], -1)).transpose(0, 1)
    level = points.mean(-1, keepdim=True) if offset else mean
    if gain:
        along = ((points - level) * centered).sum(-1, keepdim=True)
        fitted = torch.where(along > 0, gain * centered.square().sum(-1, keepdim=True) / along, scale)
        scale = fitted.clamp(scale / STRETCH, scale * STRETCH)
    scale = scale.bfloat16().float()
    return scale * points + (mean - scale * level).bfloat16().float()
