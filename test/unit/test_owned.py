"""The record of what a request owns: its content stays what it was, wherever the request goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.disaggregation.handshake import pieces_of
from sglang_oscar.features.hybrids.kept_windows import KeptWindows
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory import units
from sglang_oscar.memory.owned import RING, SINK, Holding, Owned, by_slot
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.units import Units
from support.small_cache import LONGEST, small_cache

WINDOWS, SEATS, BLOCKS, STATES = Windows(sink=4, recent=8, ring=8), 4, 7, 3
NOTES, DRAFTS = "notes", "row of drafts"  # Of features that nobody else knows.


class Server:
    """A cache with a feature of its own, and what SGLang and attention do to requests; ``running``: tokens by seat."""

    def __init__(self, carried: bool = True) -> None:
        formats = Geometry.uniform(RowLayout(2, 64, 64), WINDOWS, torch.bfloat16, 2).formats
        self.pool = Int2TokenToKVPool(
            SEATS * LONGEST - 16, formats=formats, page_size=16, device="cpu", enable_memory_saver=False, start_layer=0,
            end_layer=2,
        )  # fmt: skip
        self.cache, self.running = small_cache(WINDOWS, SEATS, BLOCKS, STATES, pool=self.pool), dict[int, int]()
        notes = Units([torch.zeros(1, SEATS + STATES, 5, dtype=torch.int32)])
        self.cache.holdings[NOTES] = Holding(
            units=notes, of=lambda seat, tokens: [seat], carried=carried, copies=STATES
        )
        slots = torch.zeros(len(self.pool.k_buffer[0]), 3, dtype=torch.int32)
        self.cache.holdings[DRAFTS] = by_slot([slots], self.cache.req_to_token_pool.req_to_token, carried=carried)

    def owned(self, seat: int) -> Owned:
        return self.cache.owned(seat, self.running[seat])

    def start(self, seat: int, tokens: int, block: int | None = None) -> None:
        self.running[seat] = tokens
        self.cache.seats.assign(seat, ring_start=0, sink_block=block or self.cache.sinks.acquire_private())
        if block is None:
            self.write(seat)

    def write(self, seat: int) -> None:
        for of in self.cache.holdings.values():
            numbers = torch.tensor(of.of(seat, self.running[seat]), dtype=torch.int64)
            of.units.write(numbers, [torch.randint(0, 100, x.shape).to(x.dtype) for x in of.units.read(numbers)])

    def free(self, seat: int) -> None:
        self.owned(seat).free()
        self.cache.seats.unassign(seat)
        del self.running[seat]

    def move(self, seat: int, to: int, told: bool = True) -> None:
        """Retract a request, give its seat to another meanwhile, and let it go on; SGLang may tell its seat."""
        tokens, sinks, table = self.running[seat], self.cache.sinks, self.cache.req_to_token_pool.req_to_token
        sinks.publish(self.cache.seats.block_of(seat) or 0, "key")
        saved = self.pool.get_cpu_copy(table[seat, :tokens], req_pool_index=seat if told else None)
        self.free(seat)
        self.start(seat, LONGEST)
        self.free(seat)
        self.start(to, tokens, sinks.acquire_shared("key"))
        self.pool.load_cpu_copy(saved, table[to, :tokens], req_pool_index=to if told else None)
        sinks.withdraw(self.cache.seats.block_of(to) or 0)


@given(st.lists(st.tuples(st.sampled_from(["write", "move", "free"]), st.integers(1, SEATS - 1)), max_size=20))
def test_content_goes_with_its_request(steps: list[tuple[str, int]]) -> None:
    """And what is written for one changes nothing of another."""
    server, expected = Server(), dict[int, dict[str, str]]()
    for index, (step, seat) in enumerate(steps):
        if seat not in server.running:
            server.start(seat, (7 * index) % LONGEST)
        elif step == "write":
            server.write(seat)
        elif step == "free":
            server.free(seat)
        else:
            before = expected[seat]
            to = next((other for other in range(1, SEATS) if other not in server.running), seat)
            server.move(seat, to, told=bool(index % 2))
            assert server.owned(to).digests() == before
        found = {seat: server.owned(seat).digests() for seat in server.running}
        assert all(found[other] == digests for other, digests in expected.items() if other in found and other != seat)
        expected = found
    assert len(server.cache.sinks._pins) == len(server.running)


@pytest.mark.parametrize("carried", [True, False])
def test_what_does_not_go_along_is_noticed(carried: bool) -> None:
    server = Server(carried)
    server.start(1, 20)
    before = server.owned(1).digests()
    server.move(1, 3)
    after = server.owned(3).digests()
    assert {name for name in before if before[name] != after[name]} == (set() if carried else {NOTES, DRAFTS})


def test_the_step_under_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write to the ring until stock, which waits for it, has copied rows."""
    server, expected = Server(), list[str]()

    def stock(*args: Any) -> None:
        server.write(1)
        expected.append(server.owned(1).digests()[RING])

    monkeypatch.setattr(MHATokenToKVPool, "get_cpu_copy", stock)
    monkeypatch.setattr(MHATokenToKVPool, "load_cpu_copy", lambda *args: None)
    server.start(1, 20)
    server.move(1, 2)
    assert [server.owned(2).digests()[RING]] == expected


@pytest.mark.parametrize("at_once", [1, 64 << 20])
def test_copies_beside_states_come_back(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next upload, but for those that a flush forgets; few of them are on their way at once, or all."""
    monkeypatch.setattr(units, "MOST_COPIED", at_once)
    server = Server()
    cache, state = server.cache, torch.tensor([2])
    for seat in (1, 2):
        server.start(seat, 9 * seat)
    cache.seats.upload()
    expected, other = server.owned(1).digests(), server.owned(2).digests()
    KeptWindows(cache)._keep(torch.tensor([1, 2]), torch.tensor([2, 1]))
    server.write(1)
    for name in (RING, SINK, NOTES):
        (unit,) = cache.holdings[name].of(1, 9)
        cache.seats.bring(cache.holdings[name], state, unit)
    assert not expected.items() & server.owned(1).digests().items()
    cache.seats.upload()
    assert dict(expected.items() & server.owned(1).digests().items()).keys() == {RING, SINK, NOTES}
    cache.seats.bring(cache.holdings[RING], state, 2)
    cache.seats.assign(2, ring_start=5, sink_block=3)
    cache.seats.clear()
    cache.seats.upload()
    assert server.owned(2).digests()[RING] == other[RING]
    assert (cache.seats.block_of(2), int(cache.seats.ring_start[2])) == (None, 0)


def test_a_record_says_what_there_is() -> None:
    server = Server()
    server.start(2, 20)
    assert str(server.owned(2)) == (
        f"seat 2 with 20 tokens: ring [2] of 8192 bytes, sink block [1] of 4096 bytes, row of history [128 ... 147] of "
        f"{20 * 160} bytes, notes [2] of 20 bytes, row of drafts [128 ... 147] of {20 * 12} bytes"
    )
    assert "sink block [] of 0 bytes" in str(server.cache.owned(3, 0))


def test_rings_are_sent_as_kernels_read_them() -> None:
    """Keys of all layers, then values; nothing without a window; what SGLang cannot send is refused."""
    server = Server()
    caches = [cache for parts in server.cache.window_buffers.layer_caches(server.pool).values() for cache in parts]
    pieces = pieces_of(RING, server.cache.holdings[RING], WINDOWS.ring)
    kernels = [layer.k_ring for layer in caches] + [layer.v_ring for layer in caches]
    assert [piece.data_ptr() for piece in pieces] == [ring.data_ptr() for ring in kernels]
    assert pieces_of(RING, small_cache(Windows(4, 0, 0)).holdings[RING], 0) == []
    with pytest.raises(Int2Error, match="notes"):
        pieces_of(NOTES, server.cache.holdings[NOTES], WINDOWS.ring)
