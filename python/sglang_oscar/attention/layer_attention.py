"""Which implementation of store and attention a device gets: Triton on a GPU, plain torch on a CPU.

The choice follows from the device alone; neither stands in for the other when something fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_kernels import reference
from oscar_kernels.cache import Chunks, StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from oscar_kernels.sink_logits import scale_by_sinks
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.kernels import Kernels, by_part
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.layer import CachedLayer


class TorchKernels:
    """The reference implementation, for machines without a GPU."""

    @by_part
    def decode(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        key, value = layer.format.key.transform, layer.format.value.transform
        reference.store(layer.cache, batch.slots, call.k, call.v, layer.format)
        lse = call.sums()
        out = reference.decode(layer.cache, batch.tables, call.q, key.reading, call.sm_scale, lse)
        out = call.with_sinks(out, lse, key.plain_center, scale_by_sinks)
        return reference.rotate(out, value.back)

    @by_part
    def verify(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        assert batch.visible is not None
        key, value = layer.format.key.transform, layer.format.value.transform
        reference.store(layer.cache, batch.slots, call.k, call.v, layer.format)
        lse = call.sums()
        out = reference.verify(layer.cache, batch.tables, batch.visible, call.q, key.reading, call.sm_scale, lse)
        out = call.with_sinks(out, lse, key.plain_center, scale_by_sinks)
        return reference.rotate(out, value.back)

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """See :class:`sglang_oscar.attention.kernels.Kernels`: nothing to decide."""
        return None

    @by_part
    def extend(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        assert batch.extend_lens is not None
        key, value = layer.format.key.transform, layer.format.value.transform
        rotated = reference.rotate(call.v, value.matrix)
        chunk = call.k if key.plain_center is None else call.k.float() - key.plain_center
        lse = call.sums()
        chunks = Chunks.of(call.q, chunk, rotated, batch.extend_lens)
        out = reference.extend(layer.cache, batch.tables, chunks, key.reading, call.sm_scale, lse)
        out = call.with_sinks(out, lse, key.plain_center, scale_by_sinks)
        reference.store(layer.cache, batch.slots, call.k, call.v, layer.format)
        return reference.rotate(out, value.back)

    def store(self, layer: CachedLayer, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        reference.store(layer.cache, slots, k, v, layer.format)


def for_device(
    cache: Int2Cache, dtype: torch.dtype, q_heads: int, drafts: int, max_batch: int, sink_logits: bool,
    steps: Sequence[int],
) -> Kernels:  # fmt: skip
    """Kernels for the device that the cache is on.

    Args:
        cache: of the pool that is attended to.
        dtype: dtype of queries, keys and values.
        q_heads: query heads on this rank.
        drafts: new tokens of a request that are verified at once; 0 without speculation.
        max_batch: requests of a step at most.
        sink_logits: whether layers come with them.
        steps: requests of the steps of decode or verification that SGLang captures.

    Raises:
        Int2Error: the kernels cannot be built on this machine.
    """
    device = cache.seats.device
    if device.type == "cuda":
        from sglang_oscar.attention.gpu import GpuKernels

        return GpuKernels(cache, dtype, device, q_heads, drafts, max_batch, sink_logits, steps)
    return TorchKernels()
