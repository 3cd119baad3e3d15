"""Rows of any number of levels with scales fitted to the codes: the server's codec at four levels, and beyond it."""

from __future__ import annotations

import torch

from oscar_kernels.codec import LEVELS, MIN_RANGE, clip, dequantize, fitted_parameters, quantize


def coded(y: torch.Tensor, group: int, ratio: float, gain: float, levels: int = LEVELS) -> torch.Tensor:
    """What a stored row gives back.

    Args:
        y: [..., d], behind its transform.
        group: channels that share scale and zero point; d where it is larger.
        ratio: of :func:`oscar_kernels.codec.clip`.
        gain: of :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps the scale of the range.
        levels: 4 is bit by bit what the server stores.

    Returns:
        float32 [..., d].
    """
    group, clipped = min(group, y.shape[-1]), clip(y, ratio)
    if levels == LEVELS:
        codes, scale, zero = quantize(clipped, group)
    else:
        grouped = clipped.unflatten(-1, (-1, group))
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = ((high - low).clamp_min(MIN_RANGE) / (levels - 1)).bfloat16()
        zero = (-low / scale.float()).bfloat16()
        codes = (grouped / scale.float()[..., None] + zero.float()[..., None] + 0.5).floor()
        codes = codes.clamp(0, levels - 1).to(torch.uint8).flatten(-2)
    if gain:
        scale, zero = fitted_parameters(y, codes, scale, gain)
    return dequantize(codes, scale, zero)
