"""Constants of one layer: what its keys and values are multiplied by, and how they are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.transform import SideTransform


@dataclass(frozen=True)
class LayerParams:
    """Constants of one layer.

    ``k_rotation`` and ``v_rotation`` are float32 [head_dim, head_dim] on the device, or None where nothing is to
    be rotated: for the identity, and for values whose rotation is absorbed into the weights. A transform need not be
    orthogonal: ``q_rotation`` is then the inverse transpose of ``k_rotation``, ``v_back`` that of ``v_rotation``, and
    None means that they are the same. ``k_center`` is float32 [kv_heads, head_dim] of this rank, subtracted from the
    transformed keys, or None. ``k_gain`` and ``v_gain`` are those of scales fitted to the codes,
    0 where scales are those of the range.
    """

    cache: LayerCache
    k_rotation: torch.Tensor | None
    v_rotation: torch.Tensor | None
    k_clip: float
    v_clip: float
    q_rotation: torch.Tensor | None = None
    v_back: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    k_gain: float = 0.0
    v_gain: float = 0.0

    @cached_property
    def format(self) -> LayerFormat:
        """The same as the kernels take it."""
        layout = self.cache.layout
        key = SideTransform(self.k_rotation, self.q_rotation, self.k_center, self.k_clip, self.k_gain)
        value = SideTransform(self.v_rotation, self.v_back, None, self.v_clip, self.v_gain)
        sides = (SideFormat(layout.group_size, layout.scale_dtype, layout.bits, of) for of in (key, value))
        return LayerFormat(layout.kv_heads, layout.head_dim, *sides)
