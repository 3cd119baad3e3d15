"""Test plugin for SGLang: takes quantization noise out of int2 mode, so that its plumbing can be judged exactly.

Rows hold float32 vectors instead of codes. Where attention gathers a request's tokens, every row of a position that
must come from the BF16 windows instead is NaN; reading one shows in the output. A sink block is NaN until it is
filled, and so is a request's ring.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch


def encode_rows(y, layout, clip_ratio, gain, codebook=None):
    exact = y.float().contiguous().view(y.shape[0], -1).view(torch.uint8)
    return torch.nn.functional.pad(exact, (0, layout.row_bytes - exact.shape[1]))


def decode_rows(rows, layout, codebook=None):
    exact = rows[:, : layout.params_offset].contiguous()
    return exact.view(torch.float32).view(rows.shape[0], layout.kv_heads, layout.head_dim)


def poisoned(gather):
    def wrapper(cache, tables, request, kv_len):
        windows, start = cache.windows, int(tables.ring_start[request])
        history_end = max(kv_len - windows.recent, start, windows.sink)
        positions = torch.arange(kv_len)
        outside = positions[(positions < windows.sink) | (positions >= history_end)]
        pages = tables.page_table[request].long()
        slots = pages[positions // tables.page_size] * tables.page_size + positions % tables.page_size
        # A copy: what a prefill server sends meanwhile must not be poisoned.
        rows = [buffer.view(torch.int32).index_select(0, slots) for buffer in (cache.k_rows, cache.v_rows)]
        for buffer in rows:
            buffer.index_fill_(0, outside, -1)  # as float32 a NaN
        k_rows, v_rows = (buffer.view(torch.uint8) for buffer in rows)
        own = torch.arange(len(pages), dtype=torch.int32).expand_as(tables.page_table)
        return gather(replace(cache, k_rows=k_rows, v_rows=v_rows), replace(tables, page_table=own), request, kv_len)

    return wrapper


def poison_windows():
    from sglang_oscar.memory.cache import Int2Cache
    from sglang_oscar.memory.seat_tables import SeatTables
    from sglang_oscar.memory.sink_store import SinkStore

    attach, acquire_private, assign = Int2Cache.attach, SinkStore.acquire_private, SeatTables.assign

    def attach_poisoned(self, kv_pool):
        caches = [part.cache for layer in self.layers.values() for part in layer.parts]
        self.seats.tensors = [x for cache in caches for x in (cache.k_ring, cache.v_ring)]
        for rings in self.seats.tensors:
            rings[1:] = float("nan")
        self.sinks.tensors = [x for cache in caches for x in (cache.k_sink, cache.v_sink)]
        for sinks in self.sinks.tensors:
            sinks[1:] = float("nan")
        attach(self, kv_pool)

    def acquire_poisoned(self):
        block = acquire_private(self)
        for sinks in self.tensors:
            sinks[block] = float("nan")
        return block

    def assign_poisoned(self, row, ring_start, sink_block):
        for rings in self.tensors:
            rings[row] = float("nan")
        assign(self, row, ring_start, sink_block)

    Int2Cache.attach, SinkStore.acquire_private, SeatTables.assign = attach_poisoned, acquire_poisoned, assign_poisoned


def print_digests():
    """When a request leaves its seat, what it has and what its rows hash to."""
    from sglang_oscar.memory.owned import ROW, SINK, Owned

    free = Owned.free

    def free_printed(self):
        logging.getLogger("sglang.lossless").info(
            "rows of %d tokens, seat %d, block %s: %s",
            self.tokens, self.seat, list(self.holdings[SINK].of(self.seat, self.tokens)), self.digests()[ROW],
        )  # fmt: skip
        free(self)

    Owned.free = free_printed


def register():
    from sglang_oscar.attach import processes

    if processes.detokenizes():
        return
    from oscar_kernels import reference
    from oscar_kernels.layout import RowLayout

    if not os.environ.get("LOSSLESS_ROWS_OF_THE_CODEC"):  # which has some of its own: those of 16 bits
        RowLayout.code_bytes = property(lambda self: 4 * self.head_dim)
        # Rows of more bits are larger here, too.
        RowLayout.param_bytes = property(lambda self: 16 * (self.bits - 2))
        reference.encode_rows = encode_rows
        reference.decode_rows = decode_rows
    reference.gather = poisoned(reference.gather)
    if os.environ.get("LOSSLESS_ROWS_PRINT_DIGESTS"):
        print_digests()
    poison_windows()
    if os.environ.get("LOSSLESS_ROWS_BRING_NO_WINDOW"):
        # Another: what a prefix hit was promised does not come.
        from sglang_oscar.features.resuming.resumed import Resumed

        move = Resumed.move
        Resumed.move = lambda self: (self._brought.clear(), move(self))
    if os.environ.get("LOSSLESS_ROWS_IGNORE_WINDOWS"):
        # A deliberate fault, to prove that poison is noticed: read everything but the newest token from rows.
        reference.split_positions = lambda kv_len, ring_start, windows: (0, max(kv_len - 1, 0))
