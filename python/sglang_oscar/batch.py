"""Tables of one batch on the device, built once per forward pass and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oscar_kernels.cache import BatchTables, StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from sglang_oscar.runtime import Runtime


@dataclass
class Batch:
    """What attention needs besides q, k and v.

    ``tables.kv_lens`` counts the new token in decode and the cached tokens before the chunk in extend.
    ``extend_lens`` and ``prefix_lens`` (host) and ``chunk_starts`` int32 [batch + 1] (device) describe the chunks
    and what is cached before them; None in decode. ``extend_plan`` is what the kernels planned for the batch.
    """

    tables: BatchTables
    slots: StoreSlots
    extend_lens: list[int] | None = None
    chunk_starts: torch.Tensor | None = None
    prefix_lens: list[int] | None = None
    extend_plan: ExtendPlan | None = None


def row_slots(positions: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, runtime: Runtime) -> StoreSlots:
    """Ring and sink slots of tokens at ``positions`` of requests in ``rows`` with sink ``blocks``.

    All arguments int64 [tokens]. The history slot is filled in by the caller.
    """
    windows = runtime.plan.geometry.windows
    nowhere = torch.full_like(positions, -1)
    ring = rows * windows.ring + positions % windows.ring if windows.ring else nowhere
    sink = torch.where(positions < windows.sink, blocks * windows.sink + positions, -1) if windows.sink else nowhere
    return StoreSlots(row=nowhere, ring=ring, sink=sink)


def page_numbers(runtime: Runtime, rows: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Page tables of the requests in ``rows``: int32 [batch, pages that hold ``max_tokens`` tokens]."""
    first_slots = runtime.req_to_token_pool.req_to_token[:, : max(max_tokens, 1) : runtime.page_size]
    return first_slots.index_select(0, rows).floor_divide_(runtime.page_size)


def decode_batch(runtime: Runtime, forward_batch: Any, max_tokens: int) -> Batch:
    """Tables for one new token per request.

    Args:
        runtime: of this process.
        forward_batch: SGLang's batch, or the padded view of it that a CUDA graph replays.
        max_tokens: upper bound of the lengths, known on the host.
    """
    runtime.rows.upload()
    rows = forward_batch.req_pool_indices.long()
    kv_lens = forward_batch.seq_lens
    blocks = runtime.rows.sink_block[rows]
    tables = BatchTables(
        page_size=runtime.page_size,
        page_table=page_numbers(runtime, rows, max_tokens),
        kv_lens=kv_lens.int(),
        ring_row=rows.int(),
        ring_start=runtime.rows.ring_start[rows],
        sink_block=blocks,
    )
    return Batch(tables, row_slots(kv_lens.long() - 1, rows, blocks.long(), runtime))


def extend_batch(runtime: Runtime, forward_batch: Any) -> Batch:
    """Tables for a chunk of new tokens per request.

    The chunk is attended to before it is stored, so the tables describe the cache without it. Of a chunk longer
    than the ring only the newest tokens go there: older ones would share their slots.
    """
    runtime.rows.upload()
    rows = forward_batch.req_pool_indices.long()
    extend_lens: list[int] = forward_batch.extend_seq_lens_cpu
    prefix_lens: list[int] = forward_batch.extend_prefix_lens_cpu
    tokens, device = sum(extend_lens), rows.device
    lens, prefix = forward_batch.extend_seq_lens.long(), forward_batch.extend_prefix_lens
    blocks = runtime.rows.sink_block[rows]
    tables = BatchTables(
        page_size=runtime.page_size,
        # One more than the prefix: a chunk of one token is decoded once it is stored.
        page_table=page_numbers(runtime, rows, max(prefix_lens, default=0) + 1),
        kv_lens=prefix.int(),
        ring_row=rows.int(),
        ring_start=runtime.rows.ring_start[rows],
        sink_block=blocks,
    )
    request = torch.repeat_interleave(torch.arange(len(extend_lens), device=device), lens, output_size=tokens)
    positions = forward_batch.positions[:tokens].long()
    slots = row_slots(positions, rows[request], blocks.long()[request], runtime)
    newest = positions >= (prefix.long() + lens)[request] - runtime.plan.geometry.windows.ring
    starts = torch.zeros(len(extend_lens) + 1, dtype=torch.int32, device=device)
    starts[1:] = lens.cumsum(0)
    slots = StoreSlots(slots.row, torch.where(newest, slots.ring, -1), slots.sink)
    return Batch(tables, slots, extend_lens, starts, prefix_lens)


class GraphBuffers:
    """Fixed-address copies of a decode batch's tables, as a captured CUDA graph reads them.

    Args:
        runtime: of this process.
        max_batch: largest batch of a graph.
    """

    def __init__(self, runtime: Runtime, max_batch: int) -> None:
        device = runtime.rows.device
        max_pages = -(-runtime.req_to_token_pool.req_to_token.shape[1] // runtime.page_size)
        self.page_size = runtime.page_size
        self.page_table = torch.zeros(max_batch, max_pages, dtype=torch.int32, device=device)
        self.ints = torch.zeros(4, max_batch, dtype=torch.int32, device=device)
        self.longs = torch.full((2, max_batch), -1, dtype=torch.int64, device=device)
        self.ints[0] = 1

    def view(self, batch_size: int) -> Batch:
        """The buffers as a batch of ``batch_size``, for capture."""
        kv_lens, ring_row, ring_start, sink_block = self.ints[:, :batch_size]
        tables = BatchTables(self.page_size, self.page_table[:batch_size], kv_lens, ring_row, ring_start, sink_block)
        ring, sink = self.longs[:, :batch_size]
        return Batch(tables, StoreSlots(row=ring, ring=ring, sink=sink))

    def fill(self, batch: Batch) -> Batch:
        """Copy a batch's tables in and return the view of them."""
        size = batch.tables.kv_lens.shape[0]
        view = self.view(size)
        self.page_table[:size, : batch.tables.page_table.shape[1]] = batch.tables.page_table
        for name in ("kv_lens", "ring_row", "ring_start", "sink_block"):
            getattr(view.tables, name).copy_(getattr(batch.tables, name))
        view.slots.ring.copy_(batch.slots.ring)
        view.slots.sink.copy_(batch.slots.sink)
        return view
