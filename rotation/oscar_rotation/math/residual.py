"""Second moment of what a data-free INT2 cache gets wrong ("uresidual")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_rotation.files.rotation_set import Side
from oscar_rotation.math.covariance import CovarianceAccumulator
from oscar_rotation.math.hadamard import hadamard
from oscar_rotation.math.quantized import quantized

GROUP_SIZE = 128
"""Channels that share a scale in that cache, as in the published one."""

SLICE = 16384
"""Rows per head quantized at a time: a sort needs several times their size."""


class ResidualCovariance(CovarianceAccumulator):
    """E = mean of (x - x^)^T (x - x^), where x^ is x after a Hadamard-rotated INT2 cache without clipping.

    A target of keys or of values that knows the quantizer but not attention: U orders the model's directions by how
    much of them a QuaRot cache loses. The paper does not define it; it is here for comparison.

    Args:
        side: "k" or "v".
        kv_heads, head_dim, device: as in the base class.
    """

    def __init__(self, side: Side, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(kv_heads, head_dim, device)
        self.side = side
        self.hadamard = hadamard(head_dim).to(self.device)

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; see the base class."""
        cached = k if self.side == "k" else v
        for heads in self._heads():
            for rows in self._rows(cached, heads).split(SLICE, 1):
                rotation = self.hadamard.to(rows.dtype)
                rotated = rows @ rotation
                lost = rotated - quantized(rotated, 1.0, GROUP_SIZE).to(rows.dtype)
                self._add(heads, lost @ rotation.mT)
        self.rows += cached.shape[0]
