"""What a device's store and attention have to offer, as the backend calls them."""

from __future__ import annotations

from typing import Protocol

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from sglang_oscar.attention.batch import Batch
from sglang_oscar.memory.layer import CachedLayer


class Kernels(Protocol):
    """Store and attention of one layer. ``v`` and results are in the basis of the cached values.

    ``sinks`` [q_heads] are sink logits of the layer's heads (:mod:`oscar_kernels.sink_logits`); None for a model
    without.
    """

    def decode(
        self,
        layer: CachedLayer,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store one token per request, then attend; q [batch, q_heads, head_dim], k and v [batch, kv_heads, ...]."""

    def verify(
        self, layer: CachedLayer, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """Store several tokens per request, then attend from all of them; q [batch * tokens, q_heads, head_dim]."""

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """Decide once per forward pass what ``extend`` does in every layer; kept in the batch."""

    def extend(
        self,
        layer: CachedLayer,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sm_scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from a chunk per request to the cache and to the chunk itself, then store the chunk."""

    def store(self, layer: CachedLayer, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens and nothing else; k and v [tokens, kv_heads, head_dim]."""
