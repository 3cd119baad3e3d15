"""What a device's store and attention have to offer, as the backend calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from oscar_kernels.parts import join_heads
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.memory.layer import AnyLayer, CachedLayer


class Kernels(Protocol):
    """Store and attention of one layer. Results are [tokens, q_heads, head_dim of ``call.v``] in its basis."""

    def decode(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Store one token per request, then attend."""

    def verify(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Store several tokens per request, then attend from all of them."""

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """Decide once per forward pass what ``extend`` does in every layer; kept in the batch."""

    def extend(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Attend from a chunk per request to the cache and to the chunk itself, and store the chunk."""

    def store(self, layer: CachedLayer, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store tokens of a layer or of a part of one and nothing else; k and v [tokens, kv_heads, head_dim]."""


def by_part(
    attend: Callable[[Any, CachedLayer, Batch, Call], torch.Tensor],
) -> Callable[[Any, AnyLayer, Batch, Call], torch.Tensor]:
    """A method that attends in one cache, of a layer in parts called for each of them."""

    @wraps(attend)
    def each(self: Any, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        return join_heads(attend(self, part, batch, own) for part, own in call.apart(layer))

    return each
