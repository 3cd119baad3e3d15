"""Device tensors of the BF16 windows: the sink store and the recent rings of all layers."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat, parts_of
from sglang_oscar.formats.geometry import Geometry


class WindowBuffers:
    """Rotated BF16 (or FP16) keys and values of sink and recent tokens.

    ``sinks`` are [sides, sink_blocks, sink, kv_heads, head_dim] and ``rings`` [sides, rings, ring, kv_heads, head_dim],
    one of each for every kv_heads and head_dim that a *side* has: keys of the first layer with such heads, or its
    values, and so on. A part of a layer that is cut is a layer here.

    Args:
        geometry: sizes of one rank.
        rings: seats of SGLang's request pool, dummy included.
        sink_blocks: blocks of the sink store, dummy included.
        device: where the tensors live.
    """

    def __init__(self, geometry: Geometry, rings: int, sink_blocks: int, device: str) -> None:
        self.geometry, windows = geometry, geometry.windows
        sides = [side for part in parts_of(geometry.formats.values()) for side in _heads(part)]
        self._kinds = list(dict.fromkeys(sides))
        self.sinks, self.rings = (
            [
                torch.zeros(
                    sides.count(kind), count, size, *kind, dtype=geometry.window_dtype, device=device,
                )
                for kind in self._kinds
            ]
            for count, size in ((sink_blocks, windows.sink), (rings, windows.ring))
        )  # fmt: skip

    def layer_caches(self, pool: Any) -> dict[int, list[LayerCache]]:
        """What the kernels read and write, part by part of each layer, by global layer id; ``pool`` is the history
        pool."""
        taken = dict.fromkeys(self._kinds, 0)

        def next_of(kind: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
            number, own = self._kinds.index(kind), taken[kind]
            taken[kind] += 1
            return self.sinks[number][own], self.rings[number][own]

        def made(part: LayerFormat, rows: tuple[torch.Tensor, torch.Tensor]) -> LayerCache:
            (k_sink, k_ring), (v_sink, v_ring) = (next_of(kind) for kind in _heads(part))
            return LayerCache(
                k_layout=part.key_layout, v_layout=part.value_layout, windows=self.geometry.windows, k_rows=rows[0],
                v_rows=rows[1], k_sink=k_sink, v_sink=v_sink, k_ring=k_ring, v_ring=v_ring,
            )  # fmt: skip

        return {
            layer_id: [made(*of) for of in zip(layer.parts, pool.rows(layer_id), strict=True)]
            for layer_id, layer in self.geometry.formats.items()
        }


def _heads(part: LayerFormat) -> tuple[tuple[int, int], tuple[int, int]]:
    """kv heads and channels of a head, of keys and of values."""
    return (part.kv_heads, part.head_dim), (part.kv_heads, part.value_head_dim)
