"""Device tensors of the BF16 windows: the sink store and the recent rings of all layers."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.cache import LayerCache
from sglang_oscar.formats.geometry import Geometry


class WindowBuffers:
    """Rotated BF16 (or FP16) keys and values of sink and recent tokens.

    ``sink`` is [2 * layers, sink_blocks, sink, kv_heads, head_dim] and ``ring`` [2 * layers, rings, ring, kv_heads,
    head_dim]: keys of the first layer, its values, and so on. All layers have the same heads.

    Args:
        geometry: sizes of one rank.
        rings: seats of SGLang's request pool, dummy included.
        sink_blocks: blocks of the sink store, dummy included.
        device: where the tensors live.
    """

    def __init__(self, geometry: Geometry, rings: int, sink_blocks: int, device: str) -> None:
        self.geometry, windows, layer = geometry, geometry.windows, geometry.any_layer
        self.sink, self.ring = (
            torch.zeros(
                2 * len(geometry.formats), count, size, layer.kv_heads, layer.head_dim,
                dtype=geometry.window_dtype, device=device,
            )
            for count, size in ((sink_blocks, windows.sink), (rings, windows.ring))
        )  # fmt: skip

    def layer_caches(self, pool: Any) -> dict[int, LayerCache]:
        """What the kernels read and write, by global layer id; ``pool`` is the history pool."""
        caches = {}
        for index, (layer_id, layer) in enumerate(self.geometry.formats.items()):
            own = slice(2 * index, 2 * index + 2)
            (k_sink, v_sink), (k_ring, v_ring), (k_rows, v_rows) = self.sink[own], self.ring[own], pool.rows(layer_id)
            caches[layer_id] = LayerCache(
                k_layout=layer.key_layout, v_layout=layer.value_layout, windows=self.geometry.windows, k_rows=k_rows,
                v_rows=v_rows, k_sink=k_sink, v_sink=v_sink, k_ring=k_ring, v_ring=v_ring,
            )  # fmt: skip
        return caches
