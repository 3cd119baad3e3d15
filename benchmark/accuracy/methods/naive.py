"""Round to nearest per token and group, no rotation, no clipping, no windows."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.methods.base import Method
from accuracy.quantizers import uniform, uniform_bits


class Naive(Method):
    """Asymmetric codes of ``bits`` over min..max of each group of channels of a token."""

    source = "round to nearest; the naive rows of OSCAR, table 2"
    sink = recent = 0

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group
        self.name = f"naive INT{bits} g{group}"

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return uniform(k, self.bits, -1, min(self.group, k.shape[-1]))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return self.keys(layer, v)

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`."""
        bits = uniform_bits(self.bits, min(self.group, head_dim))
        return bits, bits


METHODS = [partial(Naive, bits, 128) for bits in (2, 3, 4)]
