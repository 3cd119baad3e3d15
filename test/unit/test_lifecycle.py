"""Sink blocks in the life of requests: shared, refilled, published, released; on the host, without a model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_kernels.cache import Windows
from sglang_oscar.attach.feature import Feature
from sglang_oscar.attention import refill_pass
from sglang_oscar.attention.refill_pass import parts_of
from sglang_oscar.features.hybrids.kept_windows import KeptWindows
from sglang_oscar.memory import owned
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.sink_refill import Refill
from sglang_oscar.memory.units import Units
from sglang_oscar.requests import lifecycle
from support.small_cache import small_cache

SINK, SEATS = 4, 3


class RequestPool:
    """Rows 1 to SEATS, as SGLang's request pool hands them out."""

    def __init__(self) -> None:
        self.seats, self.said = list(range(1, SEATS + 1)), list[Any]()

    def free(self, req: Any, *more: Any) -> None:
        self.said.append((req, more))
        self.seats.append(req.req_pool_idx)

    def clear(self) -> None:
        self.said.append("clear")


def make_cache(blocks: int = SEATS + 1, copies: int = 0) -> Int2Cache:
    cache = small_cache(Windows(SINK, 8, 8), SEATS + 1, blocks, copies, requests=RequestPool())
    lifecycle.observe(cache)
    return cache


def request(first: int, hit: int = 0, **fields: Any) -> Any:
    made = {
        "rid": str(first), "origin_input_ids": [first] * SINK + [0], "output_ids": [], "prefix_indices": [0] * hit,
        "req_pool_idx": None, "extra_key": None, "input_embeds": None, "positional_embed_overrides": None,
        "kv_committed_len": SINK + 1, "lora_id": None,
    }  # fmt: skip
    return SimpleNamespace(**made | fields)


def admit(cache: Int2Cache, *requests: Any) -> list[Refill]:
    """Let requests gain seats in one batch; returns what its forward pass has to refill first."""
    pool = cache.req_to_token_pool

    def alloc(batch: Any) -> None:
        for req in batch.reqs:
            req.req_pool_idx = pool.seats.pop(0)

    lens = SimpleNamespace(tolist=lambda: [len(req.origin_input_ids) for req in requests])
    batch = SimpleNamespace(reqs=list(requests), req_to_token_pool=pool, seq_lens_cpu=lens)
    lifecycle.around_alloc_for_extend(alloc, batch)
    return cache.refills.take()


def finish(cache: Int2Cache, req: Any) -> None:
    cache.req_to_token_pool.free(req)
    req.req_pool_idx = None


def test_a_sink_that_is_not_full_is_not_shared() -> None:
    """The last token of a request is never computed: with it the ids would fill a sink, the block lacks it."""
    cache = make_cache()
    first = request(1, origin_input_ids=[1] * (SINK - 1), output_ids=[1], kv_committed_len=SINK - 1)
    admit(cache, first)
    finish(cache, first)
    assert [refill.token_ids for refill in admit(cache, request(1, hit=SINK))] == [(1,) * SINK]


def test_a_hit_without_its_block_is_refilled_once() -> None:
    """Two requests that begin alike, in one batch: one refill, one block, shared by a third later."""
    cache = make_cache()
    one, two, other = request(1, hit=SINK), request(1, hit=2 * SINK), request(2)
    found = admit(cache, one, two, other)
    block = cache.seats.block_of(one.req_pool_idx)
    assert found == [Refill(block, (1,) * SINK)]
    assert cache.seats.block_of(two.req_pool_idx) == block != cache.seats.block_of(other.req_pool_idx)
    finish(cache, other)
    assert admit(cache, request(1, hit=SINK)) == []
    assert cache.refills.total == 1


def test_a_block_that_may_not_be_shared_is_refilled_for_each() -> None:
    cache = make_cache()
    one, two = (request(1, hit=SINK, skip_radix_cache_insert=True) for _ in range(2))
    found = admit(cache, one, two)
    assert [refill.token_ids for refill in found] == [(1,) * SINK] * 2
    assert len({refill.block for refill in found}) == 2


def test_a_hit_whose_tokens_are_unknown_is_ended() -> None:
    """The cap on hits rules it out. The others of its batch go on."""
    cache, bad, good = make_cache(), request(1, hit=SINK, input_embeds=[[0.0]]), request(2)
    assert admit(cache, bad, good) == []
    assert "sink tokens are not known" in bad.to_finish.message
    assert bad.skip_radix_cache_insert
    assert not hasattr(good, "to_finish")
    assert (cache.seats.block_of(bad.req_pool_idx), len(cache.sinks._pins)) == (0, 1)
    finish(cache, bad)
    finish(cache, good)
    assert not cache.sinks._pins


def test_a_request_without_a_block_is_ended() -> None:
    """Sizes rule it out."""
    cache = make_cache(blocks=2)
    first, second = request(1), request(2)
    admit(cache, first, second)
    assert not hasattr(first, "to_finish")
    assert "all 1 sink blocks are pinned" in second.to_finish.message
    finish(cache, second)
    finish(cache, first)
    assert admit(cache, request(3)) == []


def test_a_hit_of_a_hybrid_model_gets_what_lies_beside_its_state() -> None:
    """The whole ring, from the window before the hit on; the sink where its block is gone; nothing is refilled."""
    cache = make_hybrid()
    slot = torch.tensor(9)
    one, two = (request(1, hit=hit, mamba_cow_src_index=f"slot {hit}", mamba_pool_idx=slot) for hit in (8 * SINK, SINK))
    fresh = request(2, mamba_cow_src_index=None, mamba_pool_idx=None)
    assert admit(cache, one, two, fresh) == []
    seats = [req.req_pool_idx for req in (one, two)]
    assert cache.seats._brought == {
        cache.holdings[owned.RING]: [("slot 32", seats[0]), ("slot 4", seats[1])],
        cache.holdings[owned.SINK]: [("slot 32", cache.seats.block_of(seats[0]))],
    }
    assert [cache.seats._pending[seat][0] for seat in (*seats, fresh.req_pool_idx)] == [24, 0, 0]
    lost, hybrid = request(3, hit=SINK, mamba_cow_src_index=None, mamba_pool_idx=None), make_hybrid()
    admit(hybrid, lost)
    assert "no state to go on from" in lost.to_finish.message
    assert not hybrid.sinks._pins


def test_a_state_from_the_host_lies_in_the_requests_own_slot() -> None:
    """SGLang copies none then. A slot that the request gets with its seat holds nothing yet."""
    cache, slot = make_hybrid(), torch.tensor(9)
    one = request(1, hit=8 * SINK, mamba_cow_src_index=None, mamba_pool_idx=slot)
    admit(cache, one)
    assert not hasattr(one, "to_finish")
    assert [int(state) for (state, _), *_ in cache.seats._brought.values()] == [9, 9]


def make_hybrid() -> Int2Cache:
    cache = make_cache(copies=3)
    cache.kept = KeptWindows(cache)
    return cache


def test_a_request_pool_says_when_rows_are_lost() -> None:
    """Of any class of SGLang's, what it has overridden included."""
    cache = make_cache()
    pool = cache.req_to_token_pool
    assert isinstance(pool, RequestPool)
    req = request(1, req_pool_idx=1)
    block = cache.sinks.acquire_private()
    cache.seats.assign(1, 0, block)
    pool.free(req, "slot")
    assert cache.seats.block_of(1) is None
    assert cache.sinks.acquire_shared(cache.sink_key(req)) == block, "a sink that is full is published first"
    cache.refills.add(1, (1,))
    pool.clear()
    assert cache.refills.take() == []
    assert pool.said == [(req, ("slot",)), "clear"]


def test_stock_pools_are_left_alone() -> None:
    stock = SimpleNamespace(req_to_token_pool=object())
    called: list[Any] = []
    lifecycle.around_alloc_for_extend(called.append, stock)
    assert called == [stock]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=60))
def test_readers_only_see_filled_blocks(steps: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: a request's block holds its own tokens, filled by itself or by a refill before."""
    cache, holds, running = make_cache(), {}, []
    seen: set[int] = set()
    for first, leaving in steps:
        if leaving < len(running):
            finish(cache, running.pop(leaving))
        if len(running) == SEATS:
            finish(cache, running.pop(0))
        req = request(first, hit=SINK if first in seen else 0)
        for refill in admit(cache, req):
            holds[refill.block] = refill.token_ids[0]
        block = cache.seats.block_of(req.req_pool_idx)
        if not req.prefix_indices:
            holds[block] = first
        running.append(req)
        seen.add(first)
        for other in running:
            assert holds[cache.seats.block_of(other.req_pool_idx)] == other.origin_input_ids[0]


def run_refills(
    queued: list[Refill], done: list[Any], monkeypatch: pytest.MonkeyPatch, beside: Any, **runner: Any
) -> None:
    """A forward pass of ``beside`` behind refills, each a pass of its adapters; ``done`` takes what happens."""
    cache = make_cache()
    for refill in queued:
        cache.refills[refill.block] = refill
    monkeypatch.setattr(refill_pass, "cache_of", lambda pool: cache)
    monkeypatch.setattr(refill_pass.releases, "resolved", lambda args: args)
    monkeypatch.setattr(refill_pass.nan, "note", lambda *given: None)
    monkeypatch.setattr(refill_pass, "refill_batch", lambda cache, refills, beside: [one.adapter for one in refills])
    pools = {"token_to_kv_pool": None, "req_to_token_pool": SimpleNamespace(size=4), "server_args": None}
    model = SimpleNamespace(**pools, **runner, attn_backend=SimpleNamespace(refilling=nullcontext))
    refill_pass.around_model_forward(lambda model, batch: done.append(("run", batch)), model, beside)


def test_an_adapter_computes_its_own_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the request beside it; the batch behind has its adapters again."""
    done: list[Any] = []
    queued = admit(make_cache(), request(1, hit=SINK, extra_key="a", lora_id="a"), request(1, hit=SINK))
    assert [refill.adapter for refill in queued] == ["a", None]
    monkeypatch.setattr(refill_pass, "tokens_at_once", lambda args: 4 * SINK)
    beside = SimpleNamespace(input_ids=SimpleNamespace(is_cuda=False))
    adapters = SimpleNamespace(prepare_lora_batch=lambda batch: done.append(("prepared", batch)))
    run_refills(queued, done, monkeypatch, beside, lora_manager=adapters)
    assert done == [("prepared", ["a", None]), ("run", ["a", None]), ("prepared", beside), ("run", beside)]


def test_pixels_that_move_to_the_host_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each pass with images, also where there are no adapters."""
    done: list[Any] = []
    images: Any = SimpleNamespace(tokens=SINK)
    queued = [Refill(1, (0,) * SINK, images), Refill(2, (0,) * SINK, images), Refill(3, (0,) * SINK)]
    monkeypatch.setattr(refill_pass, "tokens_at_once", lambda args: SINK)
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(refill_pass.torch.cuda, "current_stream", lambda: stream)
    beside = SimpleNamespace(input_ids=SimpleNamespace(is_cuda=True))
    run_refills(queued, done, monkeypatch, beside)
    assert done == [("run", [None]), "waited", ("run", [None]), "waited", ("run", [None]), ("run", beside)]


def test_sinks_beside_linear_layers_begin_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """All go to the state for padding: one at a time, and each finds it empty; SGLang's backend holds ours there."""
    left, begun, cache = torch.zeros(2, 3, 4), [], make_cache()
    cache.holdings[owned.STATE] = owned.Holding(units=Units([left]), of=lambda seat, tokens: [0])
    for block in (1, 2):
        cache.refills[block] = Refill(block, (0,) * SINK)
    monkeypatch.setattr(refill_pass, "cache_of", lambda pool: cache)
    monkeypatch.setattr(refill_pass.releases, "resolved", lambda args: args)
    monkeypatch.setattr(refill_pass, "tokens_at_once", lambda args: 4 * SINK)
    monkeypatch.setattr(refill_pass.nan, "note", lambda *given: None)
    monkeypatch.setattr(refill_pass, "refill_batch", lambda cache, refills, beside: len(refills))

    def forward(model: Any, batch: Any) -> None:
        begun.append((batch, left[:, 0].sum().item()))
        left.fill_(1)

    pools = {"token_to_kv_pool": None, "req_to_token_pool": SimpleNamespace(size=4), "server_args": None}
    beside_layers = SimpleNamespace(full_attn_backend=SimpleNamespace(refilling=nullcontext))
    batch = SimpleNamespace(input_ids=SimpleNamespace(is_cuda=False))
    refill_pass.around_model_forward(forward, SimpleNamespace(**pools, attn_backend=beside_layers), batch)
    assert begun == [(1, 0.0), (1, 0.0), (batch, 8.0)]


def test_graphs_of_prefills_are_told_where_refills_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases ask the batch for that, and the server would end."""
    done: list[Any] = []
    monkeypatch.setattr(refill_pass, "tokens_at_once", lambda args: 4 * SINK)
    beside = SimpleNamespace(input_ids=SimpleNamespace(is_cuda=False))
    translator = SimpleNamespace(bind_own_plan=lambda batch: done.append(("told", batch)))
    run_refills([Refill(1, (0,) * SINK)], done, monkeypatch, beside, kv_index_translator=translator)
    assert done == [("told", [None]), ("run", [None]), ("run", beside)]


@pytest.mark.parametrize(
    ("tokens", "requests", "sizes"),
    [(64, 9, [1, 1, 1]), (1, 9, [1, 1, 1]), (130, 9, [2, 1]), (8192, 9, [3]), (8192, 3, [3]), (8192, 2, [2, 1])],
)
def test_passes_hold_what_a_server_can(tokens: int, requests: int, sizes: list[int]) -> None:
    refills = [Refill(block, (0,) * 64) for block in (1, 2, 3)]
    assert [len(part) for part in parts_of(refills, tokens, requests)] == sizes


@pytest.mark.parametrize(("recompute", "longest", "expected"), [(True, 99, 92), (False, 99, 99), (True, 5, 5)])
def test_cap(recompute: bool, longest: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(recompute_recent=recompute, windows=Windows(SINK, 8, 8))
    monkeypatch.setattr(lifecycle.worker, "active", lambda: active)
    monkeypatch.setattr(lifecycle, "features", lambda: [Feature(name="other")])
    cap = lifecycle.after_compute_max_prefix_len
    assert cap(longest, request(1), 100) == expected
    assert cap(longest, request(1, positional_embed_overrides=object()), 100) == 0
    restoring = Feature(name="restoring", restores_windows=lambda: True)
    monkeypatch.setattr(lifecycle, "features", lambda: [Feature(name="other"), restoring])
    assert cap(longest, request(1), 100) == longest
    assert cap(longest, request(1, positional_embed_overrides=object()), 100) == 0
    monkeypatch.setattr(lifecycle.worker, "active", lambda: None)
    assert cap(longest, request(1), 100) is None
