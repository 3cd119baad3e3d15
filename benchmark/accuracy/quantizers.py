"""Scalar quantizers that several methods share, and what they store."""

from __future__ import annotations

from functools import cache

import torch

SIXTEEN = 16
"""Bits of a stored scale, zero point, norm or window element."""


def uniform(
    x: torch.Tensor, bits: int, dim: int, group: int, symmetric: bool = False, span: float = 1.0
) -> torch.Tensor:
    """Round-to-nearest over min..max of every group, with scale and zero point in bfloat16, and back.

    Args:
        x: any shape; ``group`` divides its size along ``dim``.
        bits: of a code.
        dim: along which neighbours share scale and zero point.
        group: how many share them.
        symmetric: levels at odd multiples of half a step, centered at 0, no zero point.
        span: part of min..max that the levels span; both ends are multiplied by it.

    Returns:
        float32 of the shape of ``x``.
    """
    y = x.float().movedim(dim, -1)
    grouped = y.unflatten(-1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scale = (2 * grouped.abs().amax(-1, keepdim=True).clamp_min(1e-8) / top).bfloat16().float()
        zero = torch.full_like(scale, top / 2)
    else:
        low, high = span * grouped.amin(-1, keepdim=True), span * grouped.amax(-1, keepdim=True)
        scale = ((high - low).clamp_min(1e-8) / top).bfloat16().float()
        zero = (-low / scale).bfloat16().float()
    codes = (grouped / scale + zero).round_().clamp_(0, top)
    return (scale * (codes - zero)).flatten(-2).movedim(-1, dim)


def uniform_bits(bits: float, group: int, parameters: int = 2) -> float:
    """Bits per element of codes and of ``parameters`` 16-bit numbers per group."""
    return bits + parameters * SIXTEEN / group


@cache
def lloyd_max(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and thresholds of the Lloyd-Max quantizer of a standard normal variable (Max 1960, table I).

    Returns:
        float64 levels [2^bits] and thresholds [2^bits - 1], both ascending.
    """
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    count = 2**bits
    levels = normal.icdf((torch.arange(count).double() + 0.5) / count)
    for _ in range(2000):
        edges = (levels[1:] + levels[:-1]) / 2
        bounds = torch.cat([torch.tensor([-40.0]).double(), edges, torch.tensor([40.0]).double()])
        mass = normal.cdf(bounds[1:]) - normal.cdf(bounds[:-1])
        density = normal.log_prob(bounds).exp()
        updated = (density[:-1] - density[1:]) / mass
        if float((updated - levels).abs().max()) < 1e-12:
            break
        levels = updated
    return levels, (levels[1:] + levels[:-1]) / 2


def lloyd_max_round(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Every element of ``x``, taken as standard normal, replaced by its Lloyd-Max level; float32."""
    levels, edges = (table.float().to(x.device) for table in lloyd_max(bits))
    return levels[torch.bucketize(x.float().contiguous(), edges)]
