"""Large tensors that are read now and then wait in host memory, so that a model's evaluation leaves room on its GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch


@dataclass(frozen=True)
class LayerActivations:
    """One layer: q [tokens, q_heads, d] after RoPE, k [tokens, kv_heads, d] after RoPE, v alike, all float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def parked(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in host memory; pinned where ``device``, that it is used on, is a GPU: copies are several times
    faster."""
    return x.cpu().pin_memory() if device.type == "cuda" else x.cpu()


class ParkedLayers(Sequence[LayerActivations]):
    """Activations of all layers in host memory; a layer that is asked for is copied to the device.

    Args:
        layers: wherever they are.
        device: that they are used on.
    """

    def __init__(self, layers: Iterable[LayerActivations], device: torch.device) -> None:
        self.layers = [LayerActivations(*(parked(y, device) for y in (x.q, x.k, x.v))) for x in layers]
        self.device = device

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, index: int) -> LayerActivations: ...

    @overload
    def __getitem__(self, index: slice) -> ParkedLayers: ...

    def __getitem__(self, index: int | slice) -> LayerActivations | ParkedLayers:
        if isinstance(index, slice):
            return ParkedLayers(self.layers[index], self.device)
        x = self.layers[index]
        return LayerActivations(*(y.to(self.device, non_blocking=True) for y in (x.q, x.k, x.v)))
