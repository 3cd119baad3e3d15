"""The 16-bit cache: what all others are compared with."""

from __future__ import annotations

import torch

from accuracy.attention import CacheView, Schedule
from accuracy.methods.base import Method
from accuracy.quantizers import SIXTEEN


class Bf16(Method):
    """Nothing is quantized."""

    name = "BF16"
    source = "SGLang's default"
    sink = recent = 0

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return k.float()

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return v.float()

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Sixteen."""
        return SIXTEEN, SIXTEEN

    def view(self, schedule: Schedule) -> CacheView:
        """Everything exact."""
        return CacheView()


METHODS = [Bf16]
