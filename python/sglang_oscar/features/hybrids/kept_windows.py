"""Copies of what requests own, one beside every state slot. What happens to a state happens to its copy, in the same
order on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.tables import window_slots
from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache


@dataclass
class KeptWindows:
    """The units beside state slots (:attr:`sglang_oscar.memory.owned.Holding.copies`). SGLang says by request whether a
    state is kept in a forward pass, in which slot, and in a chunk or among verified tokens behind which one.
    """

    cache: Int2Cache
    _verified: tuple[torch.Tensor, torch.Tensor] | None = None

    def await_loaded(self) -> None:
        """Windows come back with the first layer of the states that they lie beside."""
        table = self.cache.req_to_token_pool
        counter = getattr(table, "layer_transfer_counter", None)
        if counter is not None:
            counter.wait_until(min(table.mamba_map) - table.start_layer)

    def keep_chunk(self, forward_batch: Any) -> StoreSlots | None:
        """Begin to keep windows behind a token of each chunk, before the chunk is stored and once seats are uploaded.

        What lies before the chunk is copied now. The chunk's own tokens up to that token are stored a second time by
        every layer.

        Returns:
            where, by token of the chunks, -1 for nowhere; ``row`` is -1 throughout. None where no state is kept.
        """
        mask = forward_batch.mamba_track_mask
        if mask is None or forward_batch.mamba_track_seqlens is None:
            return None
        slots = torch.where(mask, forward_batch.mamba_track_indices, 0).long()
        self._keep(forward_batch.req_pool_indices.long(), slots)

        lens = forward_batch.extend_seq_lens.long()
        tokens = sum(forward_batch.extend_seq_lens_cpu)
        request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=tokens)
        end = forward_batch.extend_prefix_lens.long() + releases.tracked_tokens(forward_batch).long()
        end = torch.where(mask, end, 0)[request]
        positions, plan, buffers = forward_batch.positions[:tokens].long(), self.cache.plan, self.cache.window_buffers
        windows, slots = plan.geometry.windows, slots[request]
        first_ring, first_block = (of[0].shape[1] - plan.copies for of in (buffers.rings, buffers.sinks))
        ring, sink = window_slots(positions, slots + first_ring, slots + first_block, windows)
        before = positions < end
        return StoreSlots(
            row=torch.full_like(positions, -1),
            ring=torch.where(before & (positions >= end - windows.ring), ring, -1),
            sink=torch.where(before, sink, -1),
        )

    def keep_decoded(self, forward_batch: Any) -> None:
        """Keep the windows of those requests whose states were kept in a step of decode, once it has run."""
        mask = forward_batch.mamba_track_mask
        if mask is None or not forward_batch.forward_mode.is_decode():
            return
        chosen = _at_page_ends(forward_batch, self.cache.page_size)
        if len(chosen):
            slots = torch.where(mask[chosen], forward_batch.mamba_track_indices[chosen], 0).long().clamp(min=0)
            self._keep(forward_batch.req_pool_indices[chosen].long(), slots)

    def keep_verified(self, seats: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the windows of requests whose states were kept behind an accepted token of a step of verification.

        The ring has room for all of the step's tokens (``with_room``), so the window behind any of them is still there,
        at the places that its positions have; what lies behind that token is not read before it is written again.

        Args:
            seats: int64 [requests].
            slots: int64 [requests], 0 for those whose state was not kept.
        """
        self._keep(seats, slots)
        self._verified = seats, slots

    def keep_moved(self) -> None:
        """Keep them again, once accepted tokens of a tree have moved to where their positions are."""
        if self._verified is not None:
            self._keep(*self._verified)
            self._verified = None

    def _keep(self, seats: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep what requests own as it is now; int64 [requests] each, slot 0 for those not to be kept."""
        for of in self.cache.holdings.values():
            if of.copies:
                of.beside.copy(of.units, of.on_device(seats), slots)


def _at_page_ends(forward_batch: Any, page_size: int) -> torch.Tensor:
    """Requests, of which those whose states are kept are some: known on the host, where SGLang keeps lengths there."""
    device = forward_batch.req_pool_indices.device
    if forward_batch.seq_lens_cpu is None:
        return torch.arange(forward_batch.batch_size, device=device)
    lens = forward_batch.seq_lens_cpu[: forward_batch.batch_size]
    return (lens % page_size == 0).nonzero().flatten().to(device, non_blocking=True)
