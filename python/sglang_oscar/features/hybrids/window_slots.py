"""Kept windows as part of SGLang's state slots: whatever SGLang clears, copies, or takes to host memory and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.units import Units


class WindowSlots:
    """SGLang's SlotIndexedState: what lies beside state slots; ``indices`` are numbers of slots, integers [slots]."""

    def __init__(self, cache: Int2Cache) -> None:
        self._cache = cache

    @cached_property
    def _units(self) -> Units:
        """What has copies is known once all rooms have registered what requests own."""
        held = [of.beside for of in self._cache.holdings.values() if of.copies]
        return Units([group for units in held for group in units.groups])

    def reset_slots(self, indices: torch.Tensor) -> None:
        """Fill with zeros."""
        for group in self._units.groups:
            group.index_fill_(1, indices.long(), 0)

    def copy_slots(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """Overwrite slots with others, none of which is among them."""
        self._units.copy(self._units, src_index.long(), dst_index.long())

    def get_cpu_slots(self, indices: torch.Tensor) -> Any:
        """Copies on the host."""
        return [data.cpu() for data in self._units.read(indices.long())]

    def load_cpu_slots(self, data: Any, indices: torch.Tensor) -> None:
        """Overwrite slots with what :meth:`get_cpu_slots` gave."""
        self._units.write(indices.long(), data)

    def iter_transfer_state_entries(self) -> Iterator[tuple[str, torch.Tensor, int, int]]:
        """Tensors [slots, ...] that SGLang's host pool keeps besides states, with a name, the axis by which ranks of
        another number would cut them, and a number."""
        pieces = [piece for group in self._units.groups for piece in group]
        for number, piece in enumerate(pieces):
            yield "int2_window", piece, 0, number
