"""What a served cache would hold instead of given keys or values: rotate, clip, quantize, dequantize.

The codec is the server's own (:mod:`oscar_kernels.codec`), so errors measured here are those of serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from oscar_kernels.codec import clip_index, dequantize, quantize
from oscar_kernels.layout import largest_group


def quantized(rotated: torch.Tensor, clip_ratio: float, group_size: int) -> torch.Tensor:
    """Rotated rows as a cache would return them.

    Args:
        rotated: x R, [rows, head_dim], float32.
        clip_ratio: 1 does not clip.
        group_size: channels that share a scale at most; they divide head_dim.

    Returns:
        float32 [rows, head_dim], in the rotated basis.
    """
    return next(iter(quantized_at(rotated, [clip_ratio], group_size)))


def quantized_at(rotated: torch.Tensor, clip_ratios: Sequence[float], group_size: int) -> Iterator[torch.Tensor]:
    """:func:`quantized` at several clip ratios, with one sort of the magnitudes."""
    rotated = rotated.float()
    head_dim = rotated.shape[-1]
    ordered = rotated.abs().sort(dim=-1).values
    for ratio in clip_ratios:
        index = clip_index(head_dim, ratio)
        clipped = rotated
        if index is not None:
            tau = ordered[..., index : index + 1]
            clipped = torch.maximum(torch.minimum(rotated, tau), -tau)
        yield dequantize(*quantize(clipped, largest_group(head_dim, group_size)))
