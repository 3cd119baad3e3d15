"""Tables of a decode step in one launch, where plain torch would take some twenty between two steps of a model."""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, StoreSlots, Windows
from oscar_kernels.tables import Requests

BLOCK = 512
"""Pages that a program copies."""


@triton.jit(do_not_specialize=["page_table_stride"])
def _fill_decode_tables(
    rows_ptr, lens_ptr, req_to_token_ptr, req_to_token_stride, ring_start_of_ptr, sink_block_of_ptr,
    page_table_ptr, page_table_stride, kv_lens_ptr, ring_row_ptr, ring_start_ptr, sink_block_ptr,
    ring_slot_ptr, sink_slot_ptr,
    PAGE: tl.constexpr, RING: tl.constexpr, SINK: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    kv_len = tl.load(lens_ptr + request).to(tl.int64)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_use = page * PAGE < kv_len
    slot = tl.load(req_to_token_ptr + row * req_to_token_stride + page * PAGE, mask=in_use, other=0)
    tl.store(page_table_ptr + request * page_table_stride + page, slot // PAGE, mask=in_use)
    if tl.program_id(1) == 0:
        block = tl.load(sink_block_of_ptr + row)
        tl.store(kv_lens_ptr + request, kv_len.to(tl.int32))
        tl.store(ring_row_ptr + request, row.to(tl.int32))
        tl.store(ring_start_ptr + request, tl.load(ring_start_of_ptr + row))
        tl.store(sink_block_ptr + request, block)
        token = tl.arange(0, NEW)
        live = token < (DRAFTS if DRAFTS > 0 else 1)
        position = kv_len + token - (0 if DRAFTS > 0 else 1)
        ring_slot = tl.full([NEW], -1, tl.int64)
        if RING > 0:
            ring_slot = row * RING + position % RING
        sink_slot = tl.where(position < SINK, block.to(tl.int64) * SINK + position, -1)
        at = request * (DRAFTS if DRAFTS > 0 else 1) + token
        tl.store(ring_slot_ptr + at, ring_slot, mask=live)
        tl.store(sink_slot_ptr + at, sink_slot, mask=live)


def fill_decode_tables(
    requests: Requests, windows: Windows, longest: int, tables: BatchTables, slots: StoreSlots, drafts: int = 0
) -> None:
    """See :func:`oscar_kernels.tables.fill_decode_tables`.

    Raises:
        ValueError: the page table has no room for ``longest`` tokens.
    """
    batch, page_size = requests.rows.shape[0], tables.page_size
    pages = -(-max(longest, 1) // page_size)
    if pages > tables.page_table.shape[1]:
        raise ValueError(f"{longest} tokens take {pages} pages; the table has {tables.page_table.shape[1]}")
    if batch == 0:
        return
    _fill_decode_tables[(batch, -(-pages // BLOCK))](
        requests.rows, requests.kv_lens, requests.req_to_token, requests.req_to_token.stride(0),
        requests.ring_start, requests.sink_block,
        tables.page_table, tables.page_table.stride(0), tables.kv_lens, tables.ring_row, tables.ring_start,
        tables.sink_block, slots.ring, slots.sink,
        PAGE=page_size, RING=windows.ring, SINK=windows.sink, BLOCK=BLOCK, DRAFTS=drafts,
        NEW=triton.next_power_of_2(max(drafts, 1)),
    )  # fmt: skip
