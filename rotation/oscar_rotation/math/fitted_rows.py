"""Rows of any number of levels with scales fitted to the codes: the server's codec, and beyond its powers of two."""

from __future__ import annotations

import torch

from oscar_kernels.codec import clip, dequantize, fitted_parameters, quantize


def coded(y: torch.Tensor, group: int, ratio: float, gain: float, levels: int = 4) -> torch.Tensor:
    """What a stored row gives back.

    Args:
        y: [..., d], behind its transform.
        group: channels that share scale and zero point; d where it is larger.
        ratio: of :func:`oscar_kernels.codec.clip`.
        gain: of :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps the scale of the range.
        levels: values of a code; of 4, 8 and 16 this is bit by bit what the server stores.

    Returns:
        float32 [..., d].
    """
    codes, scale, zero = quantize(clip(y, ratio), min(group, y.shape[-1]), levels=levels)
    if gain:
        scale, zero = fitted_parameters(y, codes, scale, gain)
    return dequantize(codes, scale, zero)
