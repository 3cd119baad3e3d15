"""Tables of a decode step: the Triton kernel against plain torch, and plain torch against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kernels import tables as plain
from oscar_kernels.cache import BatchTables, StoreSlots, Windows
from oscar_kernels.tables import Requests
from oscar_kernels.triton import tables as fused

POISON = -77
POOL_ROWS, LONGEST = 9, 1500
WINDOWS = [Windows(64, 256, 256), Windows(16, 64, 96), Windows(0, 64, 64), Windows(32, 0, 0), Windows(0, 0, 0)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def requests(rows: list[int], kv_lens: list[int], dtype: torch.dtype, page_size: int) -> Requests:
    """A pool in which every row has pages of its own, in random order, and rows of tables with made-up values."""
    generator = torch.Generator().manual_seed(len(rows))
    count = -(-LONGEST // page_size)
    pages = torch.randperm(POOL_ROWS * count, generator=generator).view(POOL_ROWS, count)
    slots = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1).int()
    ring_start = torch.randint(0, LONGEST, (POOL_ROWS,), generator=generator, dtype=torch.int32)
    sink_block = torch.randint(0, 50, (POOL_ROWS,), generator=generator, dtype=torch.int32)
    made = (torch.tensor(rows), torch.tensor(kv_lens, dtype=dtype), slots, ring_start, sink_block)
    return Requests(*(x.to(DEVICE) for x in made))


def poisoned(batch: int, page_size: int) -> tuple[BatchTables, StoreSlots]:
    """Tables wider than needed, as those of a CUDA graph are."""
    pages = torch.full((batch, -(-LONGEST // page_size) + 3), POISON, dtype=torch.int32, device=DEVICE)
    ints = torch.full((4, batch), POISON, dtype=torch.int32, device=DEVICE)
    longs = torch.full((3, batch), POISON, dtype=torch.int64, device=DEVICE)
    return BatchTables(page_size, pages, *ints), StoreSlots(*longs)


def everything(tables: BatchTables, slots: StoreSlots) -> list[torch.Tensor]:
    ints = [tables.page_table, tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block]
    return [*ints, slots.row, slots.ring, slots.sink]


steps = st.lists(st.tuples(st.integers(0, POOL_ROWS - 1), st.integers(1, LONGEST)), min_size=1, max_size=6)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("page_size", [32, 64])
@settings(max_examples=15)
@given(steps, st.sampled_from([torch.int32, torch.int64]))
def test_kernel_writes_what_torch_writes(
    windows: Windows, page_size: int, step: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    rows, kv_lens = map(list, zip(*step, strict=True))
    given_requests, longest = requests(rows, kv_lens, dtype, page_size), max(kv_lens)
    results = []
    for fill in (plain.fill_decode_tables, fused.fill_decode_tables):
        tables, slots = poisoned(len(rows), page_size)
        fill(given_requests, windows, longest, tables, slots)
        results.append(everything(tables, slots))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@settings(max_examples=15)
@given(steps)
def test_tables_lead_to_the_slots_of_every_position(windows: Windows, step: list[tuple[int, int]]) -> None:
    page_size = 32
    rows, kv_lens = map(list, zip(*step, strict=True))
    pool = requests(rows, kv_lens, torch.int64, page_size)
    tables, slots = poisoned(len(rows), page_size)
    plain.fill_decode_tables(pool, windows, LONGEST, tables, slots)
    for i, (row, kv_len) in enumerate(step):
        position = torch.arange(kv_len, device=DEVICE)
        slot = tables.page_table[i, position // page_size] * page_size + position % page_size
        assert torch.equal(slot, pool.req_to_token[row, :kv_len])
        assert bool((tables.page_table[i, -(-kv_len // page_size) :] == POISON).all()), "past the last page"
        newest, block = kv_len - 1, int(pool.sink_block[row])
        assert int(slots.ring[i]) == (row * windows.ring + newest % windows.ring if windows.ring else -1)
        assert int(slots.sink[i]) == (block * windows.sink + newest if newest < windows.sink else -1)
        scalars = [tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block]
        assert [int(x[i]) for x in scalars] == [kv_len, row, int(pool.ring_start[row]), block]


def test_several_programs_copy_a_long_page_table() -> None:
    page_size, count = 32, fused.BLOCK + 5
    pool = requests([1, 2], [1, 1], torch.int64, page_size)
    slots_of = torch.randperm(2 * count, device=DEVICE).int().view(2, count).repeat_interleave(page_size, 1) * page_size
    kv_lens = torch.tensor([count * page_size - 3, (fused.BLOCK - 1) * page_size + 1], device=DEVICE)
    pool = replace(pool, rows=torch.tensor([1, 0], device=DEVICE), kv_lens=kv_lens, req_to_token=slots_of)
    tables, slots = poisoned(2, page_size)
    tables = replace(tables, page_table=torch.full((2, count), POISON, dtype=torch.int32, device=DEVICE))
    fused.fill_decode_tables(pool, WINDOWS[0], int(kv_lens.max()), tables, slots)
    pages = slots_of[:, ::page_size] // page_size
    assert torch.equal(tables.page_table[0], pages[1])
    assert torch.equal(tables.page_table[1, : fused.BLOCK], pages[0, : fused.BLOCK])
    assert bool((tables.page_table[1, fused.BLOCK :] == POISON).all())


def test_no_room_for_the_longest_request() -> None:
    pool = requests([1], [5], torch.int64, 32)
    tables, slots = poisoned(1, 32)
    with pytest.raises(ValueError, match="the table has"):
        fused.fill_decode_tables(pool, WINDOWS[0], 10 * LONGEST, tables, slots)
