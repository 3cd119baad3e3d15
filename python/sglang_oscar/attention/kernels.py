"""What a device's store and attention have to offer, as the backend calls them."""

from __future__ import annotations

from typing import Protocol

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.memory.layer import CachedLayer


class Kernels(Protocol):
    """Store and attention of one layer. Results are [tokens, q_heads, head_dim] in the basis of ``call.v``."""

    def decode(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Store one token per request, then attend."""

    def verify(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Store several tokens per request, then attend from all of them; not for models with sink logits."""

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """Decide once per forward pass what ``extend`` does in every layer; kept in the batch."""

    def extend(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Attend from a chunk per request to the cache and to the chunk itself, and store the chunk."""

    def store(self, layer: CachedLayer, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens and nothing else; k and v [tokens, kv_heads, head_dim]."""
