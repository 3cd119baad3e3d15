"""Tables on the device by seat, a request's place in SGLang's request pool: ring start and sink block.

The scheduler decides them, but never writes device memory itself: under overlap scheduling it runs ahead of the
GPU, and a finished request is decoded once more after its seat may have gone to another. Changes queue up on the
host and are uploaded by the next batch, in stream order before that batch's kernels and after those of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_oscar.memory.owned import Holding


def uploaded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Numbers of the host on the device, int64 [rows, n], without waiting for it."""
    host = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        # Fresh pinned memory each time: reusing some could overwrite it while an earlier copy is in flight.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class SeatTables:
    """Args:
    seats: seats of SGLang's request pool, the dummy 0 included.
    device: where the tables live.
    """

    def __init__(self, seats: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.ring_start = torch.zeros(seats, dtype=torch.int32, device=self.device)
        self.sink_block = torch.zeros(seats, dtype=torch.int32, device=self.device)
        self._pending: dict[int, tuple[int, int]] = {}
        self._block_of_seat: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._uploads = 0
        self.moves: Callable[[], None] | None = None
        """What else is queued for the next upload."""
        self._brought: dict[Holding, list[tuple[torch.Tensor, int]]] = {}

    def assign(self, seat: int, ring_start: int, sink_block: int) -> None:
        """A request takes over ``seat``; its ring holds positions from ``ring_start`` on."""
        self._pending[seat] = (ring_start, sink_block)
        self._block_of_seat[seat] = sink_block

    def unassign(self, seat: int) -> None:
        """The request leaves ``seat``."""
        self._left[seat] = self._uploads
        self._block_of_seat.pop(seat, None)

    def block_of(self, seat: int) -> int | None:
        """Sink block of the request in ``seat``, or None."""
        return self._block_of_seat.get(seat)

    def may_be_written(self, seat: int) -> bool:
        """Whether a batch with the last owner of ``seat`` may still run: the one that was under way when it left."""
        return seat in self._left and self._uploads - self._left[seat] < 2

    def bring(self, holding: Holding, state: torch.Tensor, unit: int) -> None:
        """Queue: a unit gets what lies beside the state in slot ``state``, int64 [1] on the device. Its last owner
        may be decoded until the next upload."""
        self._brought.setdefault(holding, []).append((state, unit))

    def clear(self) -> None:
        """Forget all assignments, and what is queued."""
        self._pending.clear()
        self._brought.clear()
        self._block_of_seat.clear()

    def upload(self) -> None:
        """Send queued changes to the device on the current stream, without waiting for it.

        Once per batch, as :meth:`may_be_written` counts batches by it: the backend does it before it builds tables.
        """
        self._uploads += 1
        if self.moves is not None:
            self.moves()
        if self._pending:
            seats, values = zip(*self._pending.items(), strict=True)
            changes = uploaded([seats, *zip(*values, strict=True)], self.device)
            self.ring_start[changes[0]] = changes[1].int()
            self.sink_block[changes[0]] = changes[2].int()
            self._pending.clear()
        for holding, queued in self._brought.items():
            states = torch.cat([state.view(1) for state, _ in queued]).long()
            units = torch.tensor([unit for _, unit in queued]).to(self.device, non_blocking=True)
            holding.units.copy(holding.beside, states, units)
        self._brought.clear()
