"""Tables of one batch on the device, built once per forward pass and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from oscar_kernels.cache import BatchTables, StoreSlots
from oscar_kernels.extend_plan import ExtendPlan
from oscar_kernels.tables import Requests, fill_decode_tables, page_numbers, window_slots
from oscar_kernels.visible import causal_words
from sglang_oscar.attention.verification import is_chain, visible_words
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.sink_refill import Refill


@dataclass
class Batch:
    """What attention needs besides q, k and v.

    ``tables.kv_lens`` counts the new token in decode and the cached tokens before the chunk in extend.
    ``extend_lens`` and ``prefix_lens`` (host) and ``chunk_starts`` int32 [batch + 1] (device) describe the chunks
    and what is cached before them; None in decode. ``extend_plan`` is what the kernels planned for the batch.
    ``visible`` int64 [batch, tokens] says in verification which new tokens of a request see which
    (:mod:`oscar_kernels.visible`); there ``kv_lens`` counts the tokens before the new ones. ``kept`` says where tokens
    of chunks go a second time, where windows are kept (:class:`sglang_oscar.memory.cache.Kept`). ``measured`` says
    whether errors of its keys are (:class:`sglang_oscar.attention.key_errors.KeyErrors`), ``sampled`` whether the
    cache's sampler sees it.
    """

    tables: BatchTables
    slots: StoreSlots
    extend_lens: list[int] | None = None
    chunk_starts: torch.Tensor | None = None
    prefix_lens: list[int] | None = None
    extend_plan: ExtendPlan | None = None
    visible: torch.Tensor | None = None
    kept: StoreSlots | None = None
    measured: bool = False
    sampled: bool = False

    @property
    def tokens(self) -> int:
        """New tokens of the batch."""
        return len(self.slots.ring)


def largest_batch(cache: Int2Cache, ranks: int) -> int:
    """Requests of a step at most: those of the request pool, filled up to a multiple of the ranks, which SGLang does
    for graphs of models whose ranks share a batch (``get_batch_sizes_to_capture``).

    Args:
        cache: of the pool that is attended to.
        ranks: that attention is split over.
    """
    requests = cache.seats.ring_start.shape[0] - 1  # Seat 0 is padding, no request.
    return -(-requests // ranks) * ranks


class DecodeTables:
    """Fixed-address tables of steps of decode or verification, as a captured CUDA graph reads them.

    Args:
        cache: of the pool that is attended to.
        max_batch: requests of a step at most.
        max_tokens: length of a request at most; by default what SGLang's request pool holds.
        drafts: new tokens of a request in verification; 0 for decode.
    """

    def __init__(self, cache: Int2Cache, max_batch: int, max_tokens: int | None = None, drafts: int = 0) -> None:
        device = cache.seats.device
        max_tokens = cache.req_to_token_pool.req_to_token.shape[1] if max_tokens is None else max(max_tokens, 1)
        self.cache = cache
        self.page_table = torch.zeros(max_batch, -(-max_tokens // cache.page_size), dtype=torch.int32, device=device)
        self.ints = torch.zeros(4, max_batch, dtype=torch.int32, device=device)
        self.drafts = drafts
        self.longs = torch.full((2, max_batch * max(drafts, 1)), -1, dtype=torch.int64, device=device)
        # Words of chains never change: they are written once, and only those of trees in every step.
        self.visible = causal_words(drafts, device).repeat(max_batch, 1) if drafts else None
        self._holds_chains = True
        self._views: dict[int, Batch] = {}
        self.ints[0] = 1
        self._fill = fill_decode_tables
        if device.type == "cuda":
            from oscar_kernels.triton import tables

            self._fill = tables.fill_decode_tables

    def view(self, batch_size: int) -> Batch:
        """The tables as a batch of ``batch_size``, the same at every call; the caller fills in the history slots."""
        if batch_size not in self._views:
            kv_lens, ring_row, ring_start, sink_block = self.ints[:, :batch_size]
            tables = BatchTables(
                self.cache.page_size, self.page_table[:batch_size], kv_lens, ring_row, ring_start, sink_block
            )
            ring, sink = self.longs[:, : batch_size * max(self.drafts, 1)]
            visible = None if self.visible is None else self.visible[:batch_size]
            self._views[batch_size] = Batch(tables, StoreSlots(row=ring, ring=ring, sink=sink), visible=visible)
        return self._views[batch_size]

    def fill(self, forward_batch: Any, max_tokens: int) -> Batch:
        """Write the tables of a step.

        Args:
            forward_batch: SGLang's batch, or the padded view of it that a CUDA graph replays.
            max_tokens: upper bound of the lengths, known on the host.

        Returns:
            the view of them.
        """
        batch = self.prepare(forward_batch)
        self.write(forward_batch, max_tokens)
        return batch

    def prepare(self, forward_batch: Any) -> Batch:
        """The part of :meth:`fill` that no graph can record: what the host has decided, and masks of trees."""
        self.cache.seats.upload()
        batch = self.view(len(forward_batch.req_pool_indices))
        if batch.visible is not None and not (self._holds_chains and is_chain(forward_batch.spec_info)):
            self._holds_chains = False
            batch.visible.copy_(visible_words(forward_batch.spec_info, forward_batch.seq_lens, self.drafts))
        return batch

    def write(self, forward_batch: Any, max_tokens: int) -> None:
        """The other part, which a graph may record: it reads tensors on the device, and ``max_tokens``."""
        cache = self.cache
        requests = Requests(
            forward_batch.req_pool_indices.long(), forward_batch.seq_lens, cache.req_to_token_pool.req_to_token,
            cache.seats.ring_start, cache.seats.sink_block,
        )  # fmt: skip
        batch = self.view(len(requests.rows))
        self._fill(requests, cache.plan.geometry.windows, max_tokens, batch.tables, batch.slots, self.drafts)


def extend_batch(cache: Int2Cache, forward_batch: Any) -> Batch:
    """Tables for a chunk of new tokens per request.

    The chunk is attended to before it is stored, so the tables describe the cache without it. Of a chunk longer
    than the ring only the newest tokens go there: older ones would share their slots. Seats have been uploaded.
    """
    seats = forward_batch.req_pool_indices.long()
    extend_lens: list[int] = forward_batch.extend_seq_lens_cpu
    prefix_lens: list[int] = forward_batch.extend_prefix_lens_cpu
    tokens, device = sum(extend_lens), seats.device
    lens, prefix = forward_batch.extend_seq_lens.long(), forward_batch.extend_prefix_lens
    blocks = cache.seats.sink_block[seats]
    tables = BatchTables(
        page_size=cache.page_size,
        # One more than the prefix: a chunk of one token is decoded once it is stored.
        page_table=page_numbers(
            cache.req_to_token_pool.req_to_token, seats, max(prefix_lens, default=0) + 1, cache.page_size
        ),
        kv_lens=prefix.int(),
        ring_row=seats.int(),
        ring_start=cache.seats.ring_start[seats],
        sink_block=blocks,
    )
    request = torch.repeat_interleave(torch.arange(len(extend_lens), device=device), lens, output_size=tokens)
    positions = forward_batch.positions[:tokens].long()
    windows = cache.plan.geometry.windows
    ring, sink = window_slots(positions, seats[request], blocks.long()[request], windows)
    newest = positions >= (prefix.long() + lens)[request] - windows.ring
    starts = torch.zeros(len(extend_lens) + 1, dtype=torch.int32, device=device)
    starts[1:] = lens.cumsum(0)
    slots = StoreSlots(row=torch.full_like(ring, -1), ring=torch.where(newest, ring, -1), sink=sink)
    return Batch(tables, slots, extend_lens, starts, prefix_lens)


def refill_batch(cache: Int2Cache, refills: Sequence[Refill]) -> Batch:
    """Tables of a pass that computes sink blocks again: a sink or its beginning a block, nothing cached before it.

    No token goes to a ring: the seats that rings belong to are those of requests in full course.
    """
    windows, device = cache.plan.geometry.windows, cache.seats.device
    lens = [len(refill.token_ids) for refill in refills]
    zeros = torch.zeros(len(refills), dtype=torch.int32, device=device)
    block = torch.tensor([refill.block for refill in refills], dtype=torch.int32)
    tables = BatchTables(
        page_size=cache.page_size,
        page_table=torch.zeros(len(refills), 1, dtype=torch.int32, device=device),
        kv_lens=zeros,
        ring_row=zeros,
        ring_start=zeros,
        sink_block=block.to(device),
    )
    sink = torch.cat(
        [refill.block * windows.sink + torch.arange(tokens) for refill, tokens in zip(refills, lens, strict=True)]
    )
    nowhere = torch.full((len(sink),), -1, dtype=torch.int64, device=device)
    starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)
    return Batch(tables, StoreSlots(row=nowhere, ring=nowhere, sink=sink.to(device)), lens, starts, [0] * len(refills))
