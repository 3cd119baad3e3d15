"""Copies of requests' windows, one beside every state slot, so that a prefix hit needs no token computed again.

A hit ends where a state of the linear layers was kept, and no other position will do: were the last tokens before it to
be computed again for their 16-bit vectors, as elsewhere, the state would have to be an older one, and a conversation
would compute its last answer again in every turn. So what the ring and the sink block held at that position is kept
with the state. What happens to a state happens to its copy, in the same order on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.cache import StoreSlots
from sglang_oscar.attach import releases
from sglang_oscar.errors import ImpossibleRequestError
from sglang_oscar.features.hybrids import tracking
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.side_buffers import SideBuffers


class KeptWindows:
    """Rows of the ring and blocks of the sink store that belong to state slots.

    Args:
        side: the buffers, with as many rows and blocks more as there are slots.
        first_row: the ring row of slot 0.
        first_block: the sink block of slot 0.
    """

    def __init__(self, side: SideBuffers, first_row: int, first_block: int) -> None:
        self.side, self.first_row, self.first_block = side, first_row, first_block
        self._rings: list[tuple[torch.Tensor, int]] = []
        self._sinks: list[tuple[torch.Tensor, int]] = []

    def source(self, req: Any) -> Any:
        """The state slot, int64 [1] on the device, that a request with a prefix hit goes on from.

        Raises:
            ImpossibleRequestError: SGLang does not say.
        """
        if (slot := releases.state_source(req)) is None:
            raise ImpossibleRequestError("a prefix hit, but no state to go on from")
        return slot

    def keep_chunk(self, cache: Int2Cache, forward_batch: Any) -> StoreSlots | None:
        """See :func:`sglang_oscar.features.hybrids.tracking.keep_chunk`."""
        return tracking.keep_chunk(self, cache, forward_batch)

    def keep_decoded(self, cache: Int2Cache, forward_batch: Any) -> None:
        """See :func:`sglang_oscar.features.hybrids.tracking.keep_decoded`."""
        tracking.keep_decoded(self, cache, forward_batch)

    def restore_ring(self, slot: torch.Tensor, row: int) -> None:
        """Queue: ring ``row`` gets what is kept with a state.

        Args:
            slot: int64 [1], on the device.
            row: of the request.
        """
        self._rings.append((slot, row))

    def restore_sink(self, slot: torch.Tensor, block: int) -> None:
        """Queue: sink ``block`` gets what is kept with a state."""
        self._sinks.append((slot, block))

    def clear(self) -> None:
        """Forget what is queued."""
        self._rings.clear()
        self._sinks.clear()

    def restore(self) -> None:
        """Do what is queued. In the stream of forward passes: an earlier owner of a row may be decoded until then."""
        if self._rings:
            self.side.copy_rings(self._slots(self._rings) + self.first_row, self._targets(self._rings))
        if self._sinks:
            self.side.copy_sinks(self._slots(self._sinks) + self.first_block, self._targets(self._sinks))
        self.clear()

    def keep(self, rows: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the windows of requests as they are now; all int64 [requests], slot 0 for those not to be kept."""
        self.side.copy_rings(rows, self.first_row + slots)
        self.side.copy_sinks(blocks, self.first_block + slots)

    @staticmethod
    def _slots(queued: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return torch.cat([slot.view(1) for slot, _ in queued]).long()

    def _targets(self, queued: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return torch.tensor([target for _, target in queued]).to(self.side.ring.device, non_blocking=True)
