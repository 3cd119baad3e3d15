"""What stored rows give back: the server's codec, and affine codes of any number of levels beyond its powers of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import clip, dequantize, fitted_parameters, quantize
from oscar_kernels.layout import largest_group
from oscar_kernels.scales import MIN_RANGE, dequantize_symmetric, fitted_scale, quantize_symmetric, rms


def coded(y: torch.Tensor, group: int, ratio: float, gain: float, levels: int = 4) -> torch.Tensor:
    """Of affine codes.

    Args:
        y: [..., d], behind its transform.
        group: channels that share scale and zero point at most; they divide d.
        ratio: of :func:`oscar_kernels.codec.clip`.
        gain: of :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps the scale of the range.
        levels: values of a code; of 4, 8 and 16 this is bit by bit what the server stores.

    Returns:
        float32 [..., d].
    """
    codes, scale, zero = quantize(clip(y, ratio), largest_group(y.shape[-1], group), levels=levels)
    if gain:
        scale, zero = fitted_parameters(y, codes, scale, gain)
    return dequantize(codes, scale, zero)


def coded_symmetric(y: torch.Tensor, group: int, gain: float, bits: int = 2) -> torch.Tensor:
    """Of symmetric codes that are not clipped; arguments and result as of :func:`coded`."""
    codes, scale = quantize_symmetric(y, largest_group(y.shape[-1], group), bits=bits)
    levels = dequantize_symmetric(codes, torch.ones_like(scale), bits)
    return dequantize_symmetric(codes, fitted_scale(y, levels, scale, gain).to(scale.dtype), bits)


def coded_by_book(y: torch.Tensor, book: Codebook, gains: Sequence[float]) -> list[torch.Tensor]:
    """Of indexes into a codebook.

    Args:
        y: [kv_heads, n, d], behind its transform.
        book: of these heads.
        gains: each as of :func:`coded`.

    Returns:
        float32 [kv_heads, n, d] for every gain.
    """
    rows = y.float().transpose(0, 1)
    scale = rms(rows)[..., None].clamp_min(MIN_RANGE)
    points = book.look_up(book.nearest(rows / scale))
    scales = (fitted_scale(rows, points, scale, gain).bfloat16().float() for gain in gains)
    return [(fitted * points).transpose(0, 1) for fitted in scales]
