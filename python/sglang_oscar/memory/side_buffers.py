"""Device tensors of the BF16 windows: the sink store and the recent rings of all layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oscar_kernels.cache import LayerCache
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.pool import Int2TokenToKVPool

MOST_COPIED = 64 << 20
"""Bytes of windows that are on their way at once: the memory account has no room for those of all requests."""


class SideBuffers:
    """Rotated BF16 (or FP16) keys and values of sink and recent tokens.

    ``sink`` and ``ring`` are one allocation each, of all layers one after the other: [2, sink_blocks, sink, kv_heads,
    head_dim] and [2, ring_rows, ring, kv_heads, head_dim] a layer; index 0 holds keys, index 1 values.

    Args:
        geometry: sizes of one rank.
        ring_rows: rows of SGLang's request pool, dummy included.
        sink_blocks: blocks of the sink store, dummy included.
        device: where the tensors live.
    """

    def __init__(self, geometry: Geometry, ring_rows: int, sink_blocks: int, device: str) -> None:
        self.geometry, windows = geometry, geometry.windows
        self._sizes = ((sink_blocks, windows.sink), (ring_rows, windows.ring))
        self.sink, self.ring = (
            torch.zeros(count * size * geometry.elements, dtype=geometry.window_dtype, device=device)
            for count, size in self._sizes
        )

    def _windows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Sink store and ring of every layer: [2, count, size, kv_heads, head_dim]."""
        begin = 0
        for layer in self.geometry.formats.values():
            end, heads = begin + layer.elements, (layer.kv_heads, layer.head_dim)
            sink, ring = (
                buffer[count * size * begin : count * size * end].view(2, count, size, *heads)
                for buffer, (count, size) in zip((self.sink, self.ring), self._sizes, strict=True)
            )
            yield sink, ring
            begin = end

    def rings(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rings of keys and of values of every layer, [ring_rows, ring, kv_heads, head_dim]; none without a window."""
        if self.ring.numel() == 0:
            return [], []
        rings = [ring for _, ring in self._windows()]
        return [ring[0] for ring in rings], [ring[1] for ring in rings]

    def row_of_ring(self, row: int) -> torch.Tensor:
        """A request's ring in all layers, keys and values: [2 * layers, ring, kv_heads, head_dim], a view."""
        layer, (count, size) = self.geometry.any_layer, self._sizes[1]
        return self.ring.view(2 * len(self.geometry.formats), count, size, layer.kv_heads, layer.head_dim)[:, row]

    def move(self, source: torch.Tensor, target: torch.Tensor, sink: torch.Tensor) -> None:
        """Copy rows of the ring to other rows of it and to the sink store, in all layers; all are read before any is
        written.

        Args:
            source, target: int64 [moves], ``ring_row * ring + position % ring``; targets are unique.
            sink: int64 [moves], ``sink_block * sink + position``; rows of block 0 are dummies.
        """
        layer = self.geometry.any_layer
        sinks, rings = (
            buffer.view(2 * len(self.geometry.formats), count * size, layer.kv_heads, layer.head_dim)
            for buffer, (count, size) in zip((self.sink, self.ring), self._sizes, strict=True)
        )
        rows = rings.index_select(1, source)
        rings.index_copy_(1, target, rows)
        if sinks.numel():
            sinks.index_copy_(1, sink, rows)

    def copy_rings(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole rows of the ring to others, in all layers; int64 [rows] each."""
        _copy(self._units(self.ring, self._sizes[1]), source, target)

    def copy_sinks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole sink blocks to others, in all layers; int64 [blocks] each."""
        _copy(self._units(self.sink, self._sizes[0]), source, target)

    def _units(self, buffer: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
        """Rows or blocks of all layers, keys and values: [2 * layers, count, elements]."""
        layer, (count, size) = self.geometry.any_layer, sizes
        return buffer.view(2 * len(self.geometry.formats), count, size * layer.kv_heads * layer.head_dim)

    def layer_caches(self, pool: Int2TokenToKVPool) -> dict[int, LayerCache]:
        """What the kernels read and write, by global layer id."""
        caches = {}
        for (layer_id, layer), (sink, ring) in zip(self.geometry.formats.items(), self._windows(), strict=True):
            k_rows, v_rows = pool.rows(layer_id)
            caches[layer_id] = LayerCache(
                k_layout=layer.key_layout,
                v_layout=layer.value_layout,
                windows=self.geometry.windows,
                k_rows=k_rows,
                v_rows=v_rows,
                k_sink=sink[0],
                v_sink=sink[1],
                k_ring=ring[0],
                v_ring=ring[1],
            )
        return caches


def _copy(units: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy units [layers, count, elements] to others, none of which is a source, some at a time."""
    if units.numel():
        at_once = max(1, MOST_COPIED // (units.shape[0] * units.shape[2] * units.element_size()))
        for some, others in zip(source.split(at_once), target.split(at_once), strict=True):
            units.index_copy_(1, others, units.index_select(1, some))
