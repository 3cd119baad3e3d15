"""Disaggregation without servers: sinks of requests whose prompts arrive, what is compared, and what it takes."""

from __future__ import annotations

import random
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.common import conn

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.attention.batch import refill_batch
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.disaggregation import arguments, handshake, waiting
from sglang_oscar.features.disaggregation.arguments import waiting_seats
from sglang_oscar.features.disaggregation.waiting import WaitingRequests
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.owned import by_slot
from sglang_oscar.memory.plan import make_plan
from sglang_oscar.memory.sink_refill import Refill
from sglang_oscar.memory.window_buffers import WindowBuffers
from sglang_oscar.requests.ending import is_ended
from support.small_cache import small_cache

SINK = 16
WINDOWS = Windows(SINK, 24, 32)
GEOMETRY = Geometry.uniform(RowLayout(2, 64, 64), WINDOWS, torch.bfloat16, layers=3)


def request(prompt: int, answer: int = 0, first: int = 7) -> SimpleNamespace:
    none = dict.fromkeys(("input_embeds", "positional_embed_overrides", "extra_key", "lora_id"))
    return SimpleNamespace(rid="r", origin_input_ids=[first, *range(1, prompt)], output_ids=list(range(answer)), **none)


LENGTHS = st.sampled_from([SINK - 1, SINK, SINK + 1]) | st.integers(1, 40)


@given(st.lists(st.tuples(LENGTHS, st.integers(7, 9)), max_size=4))
def test_every_waiting_request_gets_its_sink(requests: list[tuple[int, int]]) -> None:
    """A block of its own below a whole sink, filled with what there is; shared with its like from there on."""
    cache = small_cache(WINDOWS, blocks=9)
    shared: dict[int, int] = {}
    for prompt, first in requests:
        block = waiting.acquire_block(cache, request(prompt, first=first), prompt)
        if prompt >= SINK:
            assert shared.setdefault(first, block) == block
    queued = cache.refills.take()
    expected = [(min(prompt, SINK), first) for prompt, first in requests if prompt < SINK]
    expected += [(SINK, first) for first in shared]
    assert sorted((len(refill.token_ids), refill.token_ids[0]) for refill in queued) == sorted(expected)
    assert len({refill.block for refill in queued}) == len(queued)


def test_the_block_of_an_aborted_request_is_filled_for_its_next_owner_alone() -> None:
    """Two refills of one block in one pass would write the same slots in any order."""
    cache = small_cache(WINDOWS, blocks=9)
    cache.refills.add(cache.sinks.acquire_private(), (1, 2, 3))
    block = waiting.acquire_block(cache, request(SINK - 4), SINK - 4)
    cache.sinks.release(block)  # aborted while it waits
    for prompt, first in ((SINK - 2, 8), (SINK - 3, 9)):
        assert waiting.acquire_block(cache, request(prompt, first=first), prompt) == block
        cache.sinks.release(block)
    other, refill = cache.refills.take()
    assert other.token_ids == (1, 2, 3)
    assert refill == Refill(block, (9, *range(1, SINK - 3)))
    assert cache.refills.take() == []
    assert cache.refills.total == 2


def test_transfers_that_fail_by_the_hundred_leave_nothing() -> None:
    """Whoever is left waiting at a forward pass has its own sink behind it, and blocks come back."""
    rng, cache = random.Random(1), small_cache(WINDOWS, blocks=6)
    waits: list[tuple[int, SimpleNamespace]] = []
    held: dict[int, tuple[int, ...]] = {}
    passes = 0
    for _ in range(600):
        if len(waits) == 4 or (waits and rng.random() < 0.5):
            cache.sinks.release(waits.pop(rng.randrange(len(waits)))[0])
        req = request(rng.randrange(1, 40), first=rng.randrange(7, 12))
        waits.append((waiting.acquire_block(cache, req, len(req.origin_input_ids)), req))
        if rng.random() < 0.3:
            held |= {refill.block: refill.token_ids for refill in cache.refills.take()}
            assert [held[block] for block, _ in waits] == [tuple(req.origin_input_ids[:SINK]) for _, req in waits]
            passes += 1
    for block, _ in waits:
        cache.sinks.release(block)
    assert passes > 100
    assert not cache.sinks._pins


def test_a_token_that_is_not_computed_yet_is_in_no_sink() -> None:
    """A request that goes on after a retraction has one token more than its cache."""
    cache = small_cache(WINDOWS, blocks=9)
    waiting.acquire_block(cache, request(SINK - 2, answer=2), SINK - 1)
    (refill,) = cache.refills.take()
    assert len(refill.token_ids) == SINK - 1


@pytest.mark.parametrize("prompt", [SINK - 1, SINK + 1])
def test_an_adapter_computes_its_sinks(prompt: int) -> None:
    cache, req = small_cache(WINDOWS), request(prompt)
    req.lora_id = "one"
    waiting.acquire_block(cache, req, prompt)
    (refill,) = cache.refills.take()
    assert refill.adapter == "one"


class Said:
    """What SGLang's servers tell each other: lists of whatever name."""

    def __getattr__(self, name: str) -> list[Any]:
        setattr(self, name, [])
        found: list[Any] = getattr(self, name)
        return found


def test_rings_are_sent_position_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor whole, as so many rings of so many positions."""
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_server_args", lambda: SimpleNamespace(speculative_algorithm=None)
    )
    seats, said, pool = 4, Said(), SimpleNamespace(k_buffer=[], v_buffer=[])
    cache = small_cache(WINDOWS, seats, pool=pool)
    # What SGLang sends of a draft model is no ring.
    cache.holdings["row of drafts"] = by_slot([torch.zeros(9, 2)], torch.zeros(seats, 4), carried=True)
    handshake.around_setup_state(lambda *unused: None, said, pool)
    (lengths,), (items,) = said.state_data_lens, said.state_item_lens
    assert sum(lengths) == cache.window_buffers.rings[0].nbytes
    assert lengths == [seats * WINDOWS.ring * item for item in items]
    assert (pool.unified_swa_ring_size, pool.unified_swa_window) == (WINDOWS.ring, WINDOWS.recent)  # type: ignore[attr-defined]


def test_a_request_with_embeddings_is_ended() -> None:
    """Its sink cannot be computed from token ids; nothing is, and nobody finds it."""
    cache, req = small_cache(WINDOWS, blocks=9), request(SINK + 1)
    req.input_embeds = [[0.0]] * (SINK + 1)
    assert waiting.acquire_block(cache, req, SINK + 1) == 0
    assert cache.refills.take() == []
    assert req.to_finish.status_code == 400
    assert is_ended(req)


def test_no_sink_no_block() -> None:
    assert waiting.acquire_block(small_cache(Windows(0, 24, 32)), request(40), 40) == 0


def test_tables_of_refills_of_any_length() -> None:
    refills = [Refill(3, (1, 2)), Refill(5, tuple(range(SINK))), Refill(2, (9,))]
    batch = refill_batch(small_cache(WINDOWS, blocks=9), refills)
    assert batch.slots.sink.tolist() == [3 * SINK, 3 * SINK + 1, *range(5 * SINK, 6 * SINK), 2 * SINK]
    assert batch.chunk_starts is not None
    assert batch.chunk_starts.tolist() == [0, 2, 2 + SINK, 3 + SINK]
    assert batch.extend_lens == [2, SINK, 1]
    assert set(batch.slots.ring.tolist()) == set(batch.slots.row.tolist()) == {-1}


def common(fingerprint: str = "a" * 64, ranks: int = 2, state: int = 0, drafts: str = "", **changed: object) -> str:
    """What a server says of its cache."""
    plan = SimpleNamespace(geometry=replace(GEOMETRY, **changed))
    held = {"state": SimpleNamespace(units=SimpleNamespace(unit_bytes=state))} if state else {}
    cache = SimpleNamespace(fingerprint=fingerprint, plan=plan, holdings=held)
    return handshake.common_format(cache, ranks, drafts)  # type: ignore[arg-type]


def test_both_servers_have_what_is_compared_in_common() -> None:
    """Whatever another server could misread is in the text."""
    others = [common("b" * 64), common(ranks=4), common(window_dtype=torch.float16), common(state=64), common(state=96)]
    others += [
        common(drafts=", draft model a"),
        common(windows=Windows(8, 24, 32)),
        common(windows=Windows(16, 20, 32)),
        common(windows=Windows(16, 24, 40)),
    ]
    assert len({common(), *others}) == 10


def test_what_servers_say_of_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which model drafts, and how many tokens a step verifies; nothing where none drafts."""

    def said(facts: dict[str, str] | None, tokens: int = 4) -> str:
        monkeypatch.setattr(handshake, "draft_facts", lambda args: facts)
        return handshake.drafts(SimpleNamespace(speculative_algorithm="EAGLE", speculative_num_draft_tokens=tokens))

    assert said(None) == ""
    assert len({said({"weights": "a"}), said({"weights": "b"}), said({"weights": "a"}, 8)}) == 3
    assert said({"weights": "a"}).endswith(" with 4 tokens a step")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_sglang_refuses_another_number_of_ranks(prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent, in a line that says what to set."""
    said = {field.name: None for field in fields(conn.PrefillServerInfo) if field.default is MISSING}
    said |= dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1) | {"attn_tp_size": prefill}
    answer = SimpleNamespace(status_code=200, json=lambda: said | {"kv_cache_dtype": common(ranks=prefill)})
    monkeypatch.setattr(conn.requests, "get", lambda *_, **__: answer)
    server = Mock(prefill_info_table={}, attn_tp_size=decode, kv_cache_dtype_str=common(ranks=decode))
    with pytest.raises(RuntimeError, match="KV cache dtype mismatch") as refused:
        conn.CommonKVManager.try_ensure_parallel_info(server, "prefill")
    (line,) = str(refused.value).splitlines()
    for name, ranks in (("prefill", prefill), ("decode", decode)):
        assert f"{name} server has kv_cache_dtype=int2 with --tp-size {ranks} on both servers (format " in line


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("kind", ["plain", "is_multimodal", "is_hybrid_swa", "linear"])
def test_more_than_rows_of_text_needs_a_release(kind: str, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, windows and images were tried to arrive in newer ones; and nothing is refused where nothing arrives."""
    monkeypatch.setattr(arguments, "sends_states", lambda: sent)
    monkeypatch.setattr(arguments, "linear_config", lambda model: model if kind == "linear" else None)
    fields = {"is_multimodal": False, "is_hybrid_swa": False, kind: True}
    model = SimpleNamespace(model_path="m", hf_config=SimpleNamespace(architectures=["A"]), **fields)
    apart = SimpleNamespace(disaggregation_mode="decode", speculative_algorithm=None)
    arguments.check_model(model, SimpleNamespace(disaggregation_mode="null"))
    arguments.check_model(model, None)
    drafting = SimpleNamespace(disaggregation_mode="decode", speculative_algorithm="EAGLE")
    if kind in ("linear", "is_multimodal"):
        with pytest.raises(Int2Error, match=r"drafts with disaggregation; drop .*: m \(A\)"):
            arguments.check_model(model, drafting)
    elif sent or kind == "plain":
        arguments.check_model(model, drafting)
    if sent or kind == "plain":
        return arguments.check_model(model, apart)
    with pytest.raises(Int2Error, match=r"before SGLang 0\.5\.23; drop --disaggregation-mode: m \(A\)"):
        arguments.check_model(model, apart)


@pytest.mark.parametrize(("mode", "slots", "seats"), [("decode", 8, 8), ("decode", None, 0), ("prefill", 8, 0)])
def test_seats_that_wait(mode: str, slots: int | None, seats: int) -> None:
    assert waiting_seats(SimpleNamespace(disaggregation_mode=mode, disaggregation_decode_extra_slots=slots)) == seats


@given(st.integers(0, 50), st.integers(1, 60))
def test_waiting_requests_are_in_the_account(waiting: int, running: int) -> None:
    """As many bytes as the buffers take that are built from the plan."""
    budget = 1 << 30
    plan = make_plan(GEOMETRY, budget, running, 64, [WaitingRequests(waiting)])
    buffers = WindowBuffers(GEOMETRY, plan.rings, plan.sink_blocks, "cpu")
    assert plan.window_bytes == buffers.rings[0].nbytes + buffers.sinks[0].nbytes
    assert plan.rings == running + waiting + 1
    assert make_plan(GEOMETRY, budget, None, 64, [WaitingRequests(waiting)]).fixed_bytes <= budget
