"""Tables by seat: the device sees changes with the next upload, never before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_oscar.memory.seat_tables import SeatTables

SEATS = 6
ASSIGNMENT = st.tuples(st.integers(1, SEATS - 1), st.integers(0, 10**6), st.integers(1, 100))


@given(st.lists(st.lists(ASSIGNMENT, max_size=8), max_size=5))
def test_upload_applies_the_newest_assignment(batches: list[list[tuple[int, int, int]]]) -> None:
    tables = SeatTables(SEATS, "cpu")
    expected = torch.zeros(2, SEATS, dtype=torch.int32)
    for batch in batches:
        for seat, start, block in batch:
            tables.assign(seat, ring_start=start, sink_block=block)
            assert tables.block_of(seat) == block
        assert torch.equal(torch.stack([tables.ring_start, tables.sink_block]), expected), "written without upload"
        for seat, start, block in batch:
            expected[:, seat] = torch.tensor([start, block])
        tables.upload()
        assert torch.equal(torch.stack([tables.ring_start, tables.sink_block]), expected)


def test_a_row_that_was_left_keeps_its_values_until_the_next_owner() -> None:
    """A finished request may be decoded once more: its seat must not point elsewhere meanwhile."""
    tables = SeatTables(SEATS, "cpu")
    tables.assign(2, ring_start=5, sink_block=7)
    tables.upload()
    tables.unassign(2)
    assert tables.block_of(2) is None
    tables.upload()
    assert (int(tables.ring_start[2]), int(tables.sink_block[2])) == (5, 7)


def test_the_last_owner_of_a_row_may_run_for_another_batch() -> None:
    """The batch under way when it left, and the one that SGLang prepares meanwhile."""
    tables = SeatTables(SEATS, "cpu")
    tables.assign(2, ring_start=0, sink_block=1)
    assert not tables.may_be_written(2)
    tables.unassign(2)
    assert tables.may_be_written(2)
    tables.upload()
    assert tables.may_be_written(2)
    tables.upload()
    assert not tables.may_be_written(2)
