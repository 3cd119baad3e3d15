"""Device tensors of the BF16 windows: the sink store and the recent rings of all layers."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat, parts_of
from sglang_oscar.formats.geometry import Geometry


class WindowBuffers:
    """Rotated BF16 (or FP16) keys and values of sink and recent tokens.

    ``sinks`` are [2 * layers, sink_blocks, sink, kv_heads, head_dim] and ``rings`` [2 * layers, rings, ring, kv_heads,
    head_dim], one of each for every number of kv heads: keys of the first layer with so many, its values, and so on. A
    part of a layer that is cut is a layer here.

    Args:
        geometry: sizes of one rank.
        rings: seats of SGLang's request pool, dummy included.
        sink_blocks: blocks of the sink store, dummy included.
        device: where the tensors live.
    """

    def __init__(self, geometry: Geometry, rings: int, sink_blocks: int, device: str) -> None:
        self.geometry, windows = geometry, geometry.windows
        heads = [part.kv_heads for part in parts_of(geometry.formats.values())]
        self._kinds = list(dict.fromkeys(heads))
        self.sinks, self.rings = (
            [
                torch.zeros(
                    2 * heads.count(kind), count, size, kind, geometry.any_layer.head_dim,
                    dtype=geometry.window_dtype, device=device,
                )
                for kind in self._kinds
            ]
            for count, size in ((sink_blocks, windows.sink), (rings, windows.ring))
        )  # fmt: skip

    def layer_caches(self, pool: Any) -> dict[int, list[LayerCache]]:
        """What the kernels read and write, part by part of each layer, by global layer id; ``pool`` is the history
        pool."""
        taken = dict.fromkeys(self._kinds, 0)

        def made(part: LayerFormat, rows: tuple[torch.Tensor, torch.Tensor]) -> LayerCache:
            kind, first = self._kinds.index(part.kv_heads), taken[part.kv_heads]
            own = slice(first, first + 2)
            taken[part.kv_heads] += 2
            (k_sink, v_sink), (k_ring, v_ring) = self.sinks[kind][own], self.rings[kind][own]
            return LayerCache(
                k_layout=part.key_layout, v_layout=part.value_layout, windows=self.geometry.windows, k_rows=rows[0],
                v_rows=rows[1], k_sink=k_sink, v_sink=v_sink, k_ring=k_ring, v_ring=v_ring,
            )  # fmt: skip

        return {
            layer_id: [made(*of) for of in zip(layer.parts, pool.rows(layer_id), strict=True)]
            for layer_id, layer in self.geometry.formats.items()
        }
