"""Codebooks for pairs and fours of channels: 16 points in a plane, or 256 in four dimensions, are the same two bits per
channel as four levels each."""

from __future__ import annotations

import math
from functools import cache

import torch

from oscar_kernels.codec import STRETCH
from oscar_rotation.math.group_books import GroupBooks, fitted_books, rms

POINTS, ROUNDS, EDGE, STEPS = 16, 120, 4.5, 161
"""Points of a codebook; rounds of Lloyd's algorithm; half the width of the grid that stands for a normal plane, and its
values along an axis."""


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


def in_float8(books: GroupBooks, dtype: torch.dtype) -> GroupBooks:
    """Points as a float8 ``dtype`` holds them, with a factor per book that maps its largest to the largest."""
    factor = books.points.abs().amax((-2, -1), keepdim=True).clamp_min(1e-12) / torch.finfo(dtype).max
    return GroupBooks((books.points / factor).to(dtype).float() * factor)


@cache
def gaussian_fours(points: int, samples: int = 40_000, rounds: int = 20) -> torch.Tensor:
    """Points for four standard normal channels, fitted to draws of them: float32 [points, 4]."""
    x = torch.randn(1, samples, 4, generator=torch.Generator().manual_seed(0))
    return fitted_books(x, torch.ones(1, samples), 4, points, rounds).points[0, 0]


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
