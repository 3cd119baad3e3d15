"""Store: rotation, quantization and writing of new tokens, with query rotation, of one layer."""

from __future__ import annotations

from functools import partial

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.cuda import prompt
from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.cuda.decode import unsupported
from oscar_kernels.prepared import PreparedLayer, prepare
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store
from oscar_tools.bench.synthetic import PAGE, QWEN3_8B, WINDOWS, Heads, Layouts, layer_format, random_cache
from oscar_tools.bench.timing import device, time_us

COPIES = 8
"""Calls of a graph, each with a cache of its own."""
MOST_CUDA_TOKENS = 512
"""The CUDA kernel is for decode steps."""
REQUESTS = 64


def prepared(layouts: Layouts, key: SideTransform, value: SideTransform) -> PreparedLayer:
    """A layer's transforms as kernels take them."""
    return prepare(layer_format(layouts, key, value), torch.bfloat16)


class StoreCase:
    """``tokens`` new tokens that are stored into caches of given rows."""

    def __init__(self, tokens: int, layouts: Layouts, heads: Heads = QWEN3_8B) -> None:
        self.tokens, self.heads, self.layouts = tokens, heads, layouts
        slots = tokens + REQUESTS
        self.caches = [random_cache(slots, REQUESTS, layouts, WINDOWS, seed) for seed in range(COPIES)]
        sizes = [heads.query, heads.kv, heads.kv]
        shape = (tokens, sum(sizes), heads.head_dim)
        self.split = [torch.randn(shape, device=device()).bfloat16().split(sizes, dim=1) for _ in range(COPIES)]
        row = torch.randperm(slots, device=device())[:tokens]
        ring = torch.arange(tokens, device=device())
        sink = torch.full((tokens,), -1, dtype=torch.int64, device=device())
        self.slots = StoreSlots(row, torch.where(ring < REQUESTS * WINDOWS.ring, ring, -1), sink)
        self.q_out = torch.empty(tokens, heads.query, heads.head_dim, device=device(), dtype=torch.bfloat16)
        self.pool = torch.empty(2, slots, heads.kv, heads.head_dim, device=device(), dtype=torch.bfloat16)

    @property
    def moved_bytes(self) -> int:
        """What is read and written."""
        vectors = 2 * self.heads.query + 4 * self.heads.kv
        return self.tokens * (vectors * self.heads.head_dim * 2 + sum(layout.row_bytes for layout in self.layouts))

    def triton_us(self, layer: PreparedLayer, with_q: bool = True) -> float:
        """The Triton kernel."""
        calls = zip(self.caches, self.split, strict=True)
        return time_us([
            partial(store, c, self.slots, k, v, layer, q=q if with_q else None, q_out=self.q_out)
            for c, (q, k, v) in calls
        ])  # fmt: skip

    def cuda_us(self, layer: PreparedLayer) -> float | None:
        """The CUDA kernel; None where it is not used: servers take both CUDA kernels or neither."""
        if self.tokens > MOST_CUDA_TOKENS or unsupported(self.caches[0], PAGE, self.heads.query, torch.bfloat16):
            return None
        arranged = cuda_store.arrange(layer)
        return time_us([
            partial(cuda_store.store, c, self.slots, k, v, arranged, q, PAGE, decoding=True)
            for c, (q, k, v) in zip(self.caches, self.split, strict=True)
        ])  # fmt: skip

    def prompt_us(self, layer: PreparedLayer, with_q: bool = True) -> float | None:
        """The CUDA kernel for prompts; None for rows that it does not write."""
        if unsupported(self.caches[0], PAGE, self.heads.query, torch.bfloat16) or prompt.unsupported(self.caches[0]):
            return None
        arranged = prompt.arrange(layer, self.heads.query, PAGE)
        return time_us([
            partial(prompt.store, c, self.slots, k, v, arranged, q if with_q else None)
            for c, (q, k, v) in zip(self.caches, self.split, strict=True)
        ])  # fmt: skip

    def copy_us(self) -> float:
        """PyTorch's copy of keys and values into a BF16 cache."""
        return time_us([partial(self._copy, k, v) for _, k, v in self.split])

    def _copy(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool[0].index_copy_(0, self.slots.row, k)
        self.pool[1].index_copy_(0, self.slots.row, v)
