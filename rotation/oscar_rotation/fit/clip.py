"""Clip ratios per layer (paper, section 3: "per-token clipping thresholds" fitted from calibration data).

Objective: the squared error of the attention outputs, summed over the tokens and query heads of held-out requests,
with either the keys or the values of the history replaced by what a cache would return, sink tokens exact. The
ratio on the grid with the least error wins; of equals the one that clips least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_rotation.files.rotation_set import Side
from oscar_rotation.fit.samples import HeadSample
from oscar_rotation.math.quantized import quantized_at

CLIP_GRID = (1.0, 0.98, 0.96, 0.94, 0.92, 0.90, 0.88, 0.84, 0.80)
"""Ratios that are tried. Two of 128 channels lie between neighbours; less does not change the result."""


def fit_clip_ratio(
    side: Side, rotations: torch.Tensor, samples: Sequence[HeadSample], group_size: int
) -> tuple[float, dict[float, float]]:
    """The clip ratio of one layer and side.

    Args:
        side: "k" or "v".
        rotations: float32 [kv_heads, head_dim, head_dim].
        samples: held-out requests of the layer.
        group_size: channels that share a scale.

    Returns:
        the ratio, and ratio -> relative squared error of the attention outputs for the whole grid.
    """
    errors = dict.fromkeys(CLIP_GRID, 0.0)
    energy = sum(sample.energy for sample in samples)
    for sample in samples:
        rotation = rotations[sample.head]
        cached = sample.k if side == "k" else sample.v
        candidates = quantized_at(cached @ rotation, CLIP_GRID, group_size)
        for ratio, rotated in zip(CLIP_GRID, candidates, strict=True):
            restored = rotated @ rotation.mT
            errors[ratio] += sample.error(k=restored) if side == "k" else sample.error(v=restored)
    relative = {ratio: error / energy if energy else 0.0 for ratio, error in errors.items()}
    return min(CLIP_GRID, key=lambda ratio: relative[ratio]), relative
