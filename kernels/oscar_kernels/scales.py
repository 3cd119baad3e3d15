"""Scales of codings without a zero point, and codes that need nothing else: parts of :mod:`oscar_kernels.codec`."""

from __future__ import annotations

import math

import torch

MIN_RANGE = 1e-8
STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Scale of symmetric codes relative to the rms of a group, by bits: the step that loses least of normal numbers."""
STRETCH = 1.5
"""A fitted scale is within this factor of the one of the range: what a clipped outlier lacks is not made up for by
inflating the errors of its group. Normal rows need 0.9 to 1.3."""


def normal(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales that float16, where it is the dtype, holds as normal numbers: a range that none spans is cut off rather
    than made infinite.
    """
    bound = torch.finfo(dtype)
    return scale.clamp(bound.smallest_normal, bound.max) if dtype == torch.float16 else scale


def quantize_symmetric(
    y: torch.Tensor, group_size: int, scale_dtype: torch.dtype = torch.bfloat16, bits: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization without a zero point, per group of channels.

    Args:
        y: [..., head_dim], rotated and clipped.
        group_size: channels per group; divides head_dim.
        scale_dtype: dtype in which the scale is kept.
        bits: of a code.

    Returns:
        codes uint8 [..., head_dim] and scale [..., groups] in ``scale_dtype``; of a vector with a NaN 0 and NaN.
    """
    broken = y.isnan().any(-1, keepdim=True)
    grouped = y.float().unflatten(-1, (-1, group_size))
    scale = (rms(grouped) * STEP[bits]).clamp_min(MIN_RANGE)
    scale = normal(scale, scale_dtype).to(scale_dtype)
    levels = 1 << bits
    codes = (grouped / scale.float()[..., None] + levels / 2).floor()
    codes = codes.flatten(-2).masked_fill(broken, 0).clamp(0, levels - 1).to(torch.uint8)
    return codes, scale.masked_fill(broken, math.nan)


def rms(y: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of the last dimension, float32, summed in float64."""
    return y.double().square().mean(-1).sqrt().float()


def dequantize_symmetric(codes: torch.Tensor, scale: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """Inverse of :func:`quantize_symmetric`: float32 [..., head_dim]."""
    grouped = codes.float().unflatten(-1, (scale.shape[-1], -1)) - ((1 << bits) - 1) / 2
    return (scale.float()[..., None] * grouped).flatten(-2)


def fitted_scale(y: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, gain: float) -> torch.Tensor:
    """Scale of codings without a zero point, fitted to what the codes stand for: <x^, y> = gain <y, y>.

    Args:
        y: [..., head_dim], rotated, not clipped.
        codes: float32 [..., head_dim], what is read back with a scale of 1.
        scale: [..., groups], the scale that the codes were found with.
        gain: length along y that is read back, relative to that of y; 0 keeps ``scale``.

    Returns:
        float32 [..., groups]: within :data:`STRETCH` of ``scale``; that itself where codes do not point along y.
    """
    if not gain:
        return scale.float()
    given = scale.double()
    grouped, other = (x.double().unflatten(-1, (scale.shape[-1], -1)) for x in (y, codes))
    along = (grouped * other).sum(-1)
    fitted = torch.where(along > 0, gain * grouped.square().sum(-1) / along, given)
    return fitted.clamp(given / STRETCH, given * STRETCH).float()
