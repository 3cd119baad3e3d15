"""Saw-INT4: a block-diagonal Hadamard rotation and 4-bit codes per token."""

from __future__ import annotations

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method, Transforms, shared
from accuracy.quantizers import uniform, uniform_bits
from oscar_rotation.math.hadamard import block_hadamard


class SawInt4(Method):
    """Hadamard blocks of 64 channels on keys and values, INT4 per token over groups of 128, no windows."""

    name = "Saw-INT4"
    source = "Jia et al. 2026 (arXiv 2604.19157): block-diagonal Hadamard, token-wise INT4"
    sink = recent = 0
    bits, group, block = 4, 128, 64
    rotation: Transforms

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        d = calibration.head_dim
        self.rotation = shared(block_hadamard(d, min(self.block, d)), calibration)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        rotated = self.rotation.into(layer, k)
        return self.rotation.out(layer, uniform(rotated, self.bits, -1, min(self.group, k.shape[-1])))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return self.keys(layer, v)

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`."""
        bits = uniform_bits(self.bits, min(self.group, head_dim))
        return bits, bits


METHODS = [SawInt4]
