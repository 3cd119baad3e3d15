"""Per-row tables on the device: ring start and sink block of every request row.

The scheduler decides them, but never writes device memory itself: under overlap scheduling it runs ahead of the
GPU, and a finished request is decoded once more after its row may have gone to another. Changes queue up on the
host and are uploaded by the next batch, in stream order before that batch's kernels and after those of the last.
"""

from __future__ import annotations

import torch

from sglang_oscar.memory.owned import Holding


class RowTables:
    """Args:
    rows: rows of SGLang's request pool, the dummy row 0 included.
    device: where the tables live.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.ring_start = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.sink_block = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._pending: dict[int, tuple[int, int]] = {}
        self._block_of_row: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._uploads = 0
        self._brought: dict[Holding, list[tuple[torch.Tensor, int]]] = {}

    def assign(self, row: int, ring_start: int, sink_block: int) -> None:
        """A request takes over ``row``; its ring holds positions from ``ring_start`` on."""
        self._pending[row] = (ring_start, sink_block)
        self._block_of_row[row] = sink_block

    def unassign(self, row: int) -> None:
        """The request leaves ``row``."""
        self._left[row] = self._uploads
        self._block_of_row.pop(row, None)

    def block_of(self, row: int) -> int | None:
        """Sink block of the request in ``row``, or None."""
        return self._block_of_row.get(row)

    def may_be_written(self, row: int) -> bool:
        """Whether a batch with the last owner of ``row`` may still run: the one that was under way when it left."""
        return row in self._left and self._uploads - self._left[row] < 2

    def bring(self, holding: Holding, state: torch.Tensor, unit: int) -> None:
        """Queue: a unit gets what lies beside the state in slot ``state``, int64 [1] on the device. Its last owner
        may be decoded until the next upload."""
        self._brought.setdefault(holding, []).append((state, unit))

    def clear(self) -> None:
        """Forget all assignments, and what is queued."""
        self._pending.clear()
        self._brought.clear()
        self._block_of_row.clear()

    def upload(self) -> None:
        """Send queued changes to the device on the current stream, without waiting for it.

        Once per batch, as :meth:`may_be_written` counts batches by it: the backend does it before it builds tables.
        """
        self._uploads += 1
        if self._pending:
            # A fresh pinned tensor each time: reusing one could overwrite it while an earlier copy is in flight.
            rows, values = zip(*self._pending.items(), strict=True)
            host = torch.tensor([rows, *zip(*values, strict=True)], dtype=torch.int64)
            if self.device.type == "cuda":
                host = host.pin_memory()
            changes = host.to(self.device, non_blocking=True)
            self.ring_start[changes[0]] = changes[1].int()
            self.sink_block[changes[0]] = changes[2].int()
            self._pending.clear()
        for holding, queued in self._brought.items():
            states = torch.cat([state.view(1) for state, _ in queued]).long()
            units = torch.tensor([unit for _, unit in queued]).to(self.device, non_blocking=True)
            holding.units.copy(holding.beside, states, units)
        self._brought.clear()
