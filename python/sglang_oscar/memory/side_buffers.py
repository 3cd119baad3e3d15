"""Device tensors of the BF16 windows: the sink store and the recent rings of all layers."""

from __future__ import annotations

import torch

from oscar_kernels.cache import LayerCache
from sglang_oscar.memory.plan import Geometry
from sglang_oscar.memory.pool import Int2TokenToKVPool


class SideBuffers:
    """Rotated BF16 (or FP16) keys and values of sink and recent tokens.

    Shapes: ``sink`` [2, layers, sink_blocks, sink, kv_heads, head_dim], ``ring`` [2, layers, ring_rows, ring,
    kv_heads, head_dim]; index 0 holds keys, index 1 values.

    Args:
        geometry: sizes of one rank.
        ring_rows: rows of SGLang's request pool, dummy included.
        sink_blocks: blocks of the sink store, dummy included.
        device: where the tensors live.
    """

    def __init__(self, geometry: Geometry, ring_rows: int, sink_blocks: int, device: str) -> None:
        self.geometry = geometry
        heads = (geometry.layout.kv_heads, geometry.layout.head_dim)
        windows, layers = geometry.windows, geometry.layers
        sizes = [(2, layers, sink_blocks, windows.sink, *heads), (2, layers, ring_rows, windows.ring, *heads)]
        self.sink, self.ring = (torch.zeros(size, dtype=geometry.window_dtype, device=device) for size in sizes)

    def layer_caches(self, pool: Int2TokenToKVPool) -> list[LayerCache]:
        """What the kernels read and write, one entry per layer of this rank."""
        caches = []
        for index in range(self.geometry.layers):
            k_rows, v_rows = pool.rows(pool.start_layer + index)
            caches.append(
                LayerCache(
                    k_layout=self.geometry.layout,
                    v_layout=self.geometry.layout,
                    windows=self.geometry.windows,
                    k_rows=k_rows,
                    v_rows=v_rows,
                    k_sink=self.sink[0, index],
                    v_sink=self.sink[1, index],
                    k_ring=self.ring[0, index],
                    v_ring=self.ring[1, index],
                )
            )
        return caches
