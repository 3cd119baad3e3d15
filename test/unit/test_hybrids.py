"""Parts of int2 mode for hybrid models: layers, the account of states, copies of windows, what is kept where."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.hybrids import attention, kept_windows, known_name, pool, refusals
from sglang_oscar.features.hybrids.kept_windows import KeptWindows
from sglang_oscar.features.hybrids.state_slots import StateSlots, balanced_ratio, estimate, slots_within, state_bytes
from sglang_oscar.features.hybrids.verified_states import KeepsWindows
from sglang_oscar.features.hybrids.window_slots import WindowSlots
from sglang_oscar.features.speculation import commit
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.geometry import Geometry, with_room
from sglang_oscar.memory.plan import make_plan
from support.small_cache import small_cache

WINDOWS = Windows(sink=4, recent=8, ring=8)
ROWS, BLOCKS, SLOTS = 3, 5, 4


def geometry(layers: int = 2, windows: Windows = WINDOWS, head_dim: int = 64) -> Geometry:
    return Geometry.uniform(RowLayout(2, head_dim, 64, torch.bfloat16), windows, torch.bfloat16, layers)


def qwen3_next() -> Any:
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    return Qwen3NextConfig(num_hidden_layers=48, full_attention_interval=4)


def test_full_attention_layers_keep_their_global_ids() -> None:
    model = SimpleNamespace(hf_config=qwen3_next(), num_hidden_layers=48, linear_attn_registry_result=None)
    model.hf_config.get_text_config = lambda: model.hf_config
    model.is_hybrid_swa = False
    assert cached_layer_ids(model) == tuple(range(3, 48, 4))


def test_state_of_qwen3_next() -> None:
    """A slot takes what SGLang says it takes, 77 MB; a token 3,456 bytes, of 12 layers and not of 48."""
    costs = Geometry.uniform(RowLayout(2, 256, 128, torch.bfloat16), Windows(64, 256, 256), torch.bfloat16, 12)
    assert (costs.cell_bytes, costs.full_token_bytes) == (3456, 24576)
    slots = estimate(qwen3_next(), costs, 85 << 30)
    assert slots.state_bytes == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert slots.copy_bytes == (256 + 64) * 24576
    # As many tokens a slot as in 16 bits.
    left = (85 << 30) - slots.bytes
    tokens_in_16_bits = (slots.state_bytes + slots.copy_bytes) / 0.9 / 24576
    assert left / 3456 / slots.slots == pytest.approx(tokens_in_16_bits, rel=0.01)
    assert balanced_ratio(costs, 0.5) == 0.5
    assert slots_within(100, 1.0, 60) < 1


@pytest.mark.parametrize(
    ("module", "name", "stated"),
    [
        ("nemotron_h", "NemotronHConfig", {"n_groups": 2, "mamba_num_heads": 8, "hybrid_override_pattern": "M*M"}),
        ("falcon_h1", "FalconH1Config", {"mamba_n_groups": 2, "num_hidden_layers": 3, "mamba_n_heads": 32}),
        ("granitemoehybrid", "GraniteMoeHybridConfig", {"layer_types": ["mamba"] * 3, "num_hidden_layers": 3}),
    ],
)
def test_states_of_mamba2_are_as_large_as_sglang_says(
    module: str, name: str, stated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each name that a size has."""
    configs = importlib.import_module(f"sglang.srt.configs.{module}")
    monkeypatch.setattr(configs, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))
    linear = getattr(configs, name)(**stated)
    assert state_bytes(linear, 2) == linear.mamba2_cache_params.mamba_cache_per_req


@given(
    budget=st.integers(2000, 10**6), verified=st.sampled_from([0, 100, 400]), running=st.integers(0, 60),
    per_request=st.integers(1, 6),
)  # fmt: skip
def test_states_behind_drafts_are_counted(budget: int, verified: int, running: int, per_request: int) -> None:
    """What SGLang allocates fits, and with a slot more it would not."""

    def taken(slots: int) -> int:
        return (slots + 1) * 50 + (min(running, slots // per_request) + 1) * verified

    slots = slots_within(2 * budget, 1.0, 50, per_request, verified, running)
    assert slots < 0 or taken(slots) <= budget
    more = slots + 2 + per_request
    assert taken(more) + verified > budget


@given(slots=st.integers(1, 200), asked=st.one_of(st.none(), st.integers(1, 64)))
def test_no_more_requests_than_states(slots: int, asked: int | None) -> None:
    plan = make_plan(geometry(), 1 << 30, asked, 64, [StateSlots(slots, 100, 10, 5)])
    assert plan.max_running == max(1, min(asked or 256, slots // 5))
    assert "states of linear layers" in " ".join(plan.lines(1000))


@given(prefix=st.integers(0, 5), length=st.integers(1, 40), tracked=st.integers(0, 40), kept_too=st.booleans())
def test_a_chunk_leaves_the_window_behind_its_token(prefix: int, length: int, tracked: int, kept_too: bool) -> None:
    """Whatever is in the copy afterwards is the position that the window behind the token has there."""
    prefix, tracked = 8 * prefix, min(tracked, length)
    cache = small_cache(WINDOWS, ROWS, BLOCKS, SLOTS, layers=1)
    kept, seat, block, slot = KeptWindows(cache), 1, 2, 3
    rings, sinks = cache.window_buffers.rings[0].flatten(3), cache.window_buffers.sinks[0].flatten(3)
    for position in range(prefix):
        rings[:, seat, position % 8] = position + 1
        if position < 4:
            sinks[:, block, position] = position + 1
    cache.seats.sink_block[seat] = block
    batch = SimpleNamespace(
        mamba_track_mask=torch.tensor([kept_too]),
        mamba_track_indices=torch.tensor([slot]),
        mamba_track_seqlens=torch.tensor([prefix + tracked]),
        req_pool_indices=torch.tensor([seat]),
        extend_seq_lens=torch.tensor([length]),
        extend_seq_lens_cpu=[length],
        extend_prefix_lens=torch.tensor([prefix]),
        positions=torch.arange(prefix, prefix + length),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_windows.releases, "tracked_tokens", lambda batch: torch.tensor([tracked]))
        slots = kept.keep_chunk(batch)
    assert slots is not None
    for token in range(length):
        for window, index, size in ((rings, slots.ring, 8), (sinks, slots.sink, 4)):
            if (at := int(index[token])) >= 0:
                window[:, at // size, at % size] = prefix + token + 1
    if not kept_too:
        assert not bool(rings[:, ROWS + slot].any())
        return
    end = prefix + tracked
    for position in range(max(0, end - 8), end):
        assert bool((rings[:, ROWS + slot, position % 8] == position + 1).all())
    for position in range(min(4, end)):
        assert bool((sinks[:, BLOCKS + slot, position] == position + 1).all())


def test_decode_keeps_whole_windows_where_a_state_is_kept() -> None:
    cache = small_cache(WINDOWS, ROWS, BLOCKS, SLOTS)
    kept, buffers = KeptWindows(cache), cache.window_buffers
    buffers.rings[0].copy_(torch.arange(buffers.rings[0].numel()).view(buffers.rings[0].shape) % 251)
    mode = SimpleNamespace(is_decode=lambda: True)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=2,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens_cpu=torch.tensor([8, 12]),
        mamba_track_mask=torch.tensor([True, False]),
        mamba_track_indices=torch.tensor([2, 3]),
    )
    rings = buffers.rings[0].clone()
    kept.keep_decoded(batch)
    assert torch.equal(buffers.rings[0][:, ROWS + 2], rings[:, 1])
    assert torch.equal(buffers.rings[0][:, ROWS + 3], rings[:, ROWS + 3])
    batch.seq_lens_cpu = torch.tensor([9, 13])
    before = buffers.rings[0].clone()
    kept.keep_decoded(batch)
    assert torch.equal(buffers.rings[0], before)


def stock_attention(pool: Any) -> HybridLinearAttnBackend:
    """SGLang's attention of a hybrid model, of parts that say what it asks them."""
    said = dict.fromkeys(("kv_index_translator", "max_context_len"))
    said |= dict.fromkeys(("needs_cpu_seq_lens", "use_captured_forward_metadata_for_breakable_cuda_graph"), False)
    full = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=pool, **said)
    linear = SimpleNamespace(needs_cpu_seq_lens=False, supports_prefill_graph_extend=lambda: False)
    return HybridLinearAttnBackend(full, linear, [0])  # type: ignore[arg-type]


NEW = 4
"""Tokens that a step of verification adds to a request."""


@given(length=st.integers(8, 40), accepted=st.permutations(range(1, NEW)), data=st.data())
def test_verification_leaves_the_window_behind_its_token(length: int, accepted: list[int], data: st.DataObject) -> None:
    """Tokens of a path through a tree lie scattered until they move; the copy is of the window behind one of them."""
    windows = with_room(WINDOWS, NEW)
    cache = small_cache(windows, ROWS, BLOCKS, SLOTS, layers=1)
    cache.kept = KeptWindows(cache)
    rings, ring = cache.window_buffers.rings[0].flatten(3), windows.ring
    rings[:, 2] = 99
    path = [0, *sorted(accepted[: data.draw(st.integers(0, NEW - 1))])]
    tracked = data.draw(st.integers(1, len(path)))
    for position in range(length):
        rings[:, 1, position % ring] = position + 1
    for node in range(NEW):  # what is rejected is told from all others
        place = path.index(node) if node in path else 100
        rings[:, 1, (length + node) % ring] = length + place + 1
    # The second request's page does not end, or it has ended itself and is verified once more.
    other = data.draw(st.sampled_from([(3, -1), (-1, 0)]))
    slot, step = (torch.tensor(of) for of in zip((2, path[tracked - 1]), other, strict=True))
    cache.attach(cache.req_to_token_pool)
    hybrid = KeepsWindows.in_place_of(stock_attention(cache.req_to_token_pool))
    seats, before = torch.tensor([1, 2]), rings[:, ROWS + 3].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridLinearAttnBackend, "update_mamba_state_after_mtp_verify", lambda *_, **__: None)
        hybrid.update_mamba_state_after_mtp_verify(step, slot, step, None, seats)
    slots = torch.arange(NEW)
    batch = SimpleNamespace(req_pool_indices=seats[:1], seq_lens=torch.tensor([length]), out_cache_loc=slots)
    allocator = SimpleNamespace(get_kvcache=lambda: cache.req_to_token_pool)
    accept_index = torch.tensor([path + [-1] * (NEW - len(path))])
    if path != list(range(len(path))):
        commit.around_move_accept_tokens(lambda *_: None, batch, accept_index, None, allocator)
    end = length + tracked
    for position in range(end - windows.recent, end):
        assert bool((rings[:, ROWS + 2, position % ring] == position + 1).all())
    assert torch.equal(rings[:, ROWS + 3], before)


ALLOWED = {
    "enable_torch_compile": False,
    "mamba_radix_cache_strategy": "auto", "linear_attn_backend": "triton", "enable_mixed_chunk": False,
    "enable_hierarchical_cache": False, "disaggregation_mode": "null", "disable_radix_cache": False,
    "disable_overlap_schedule": True, "hicache_storage_backend": None, "hicache_mem_layout": "page_first",
    "speculative_algorithm": None,
}  # fmt: skip


def refused(**changed: Any) -> list[str]:
    """Why a hybrid model is refused with these arguments."""
    return [what for check, what in refusals.ARGUMENTS if check(SimpleNamespace(**ALLOWED | changed))]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("enable_torch_compile", True),
        ("mamba_radix_cache_strategy", "no_buffer"),
        ("linear_attn_backend", "cutedsl"), ("linear_attn_prefill_backend", "cutedsl"),
        ("enable_int8_mamba_checkpoint", True), ("enable_linear_replayssm", True),
        ("enable_mixed_chunk", True),
    ],
)  # fmt: skip
def test_refused(argument: str, value: Any) -> None:
    assert refused() == []
    assert len(refused(**{argument: value})) == 1


@pytest.mark.parametrize(
    ("right", "drafts", "change"),
    [
        (True, None, None),
        (True, "NGRAM", "drop --speculative-algorithm"),
        (False, None, "install sglang 0.5.20 or later"),
    ],
)
def test_mamba2(right: bool, drafts: str | None, change: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served without drafts, where SGLang keeps the right states; other hybrids have both."""
    monkeypatch.setattr(refusals, "linear_config", lambda model: model)
    monkeypatch.setattr(refusals, "finds_states_of_mamba2", lambda: right)
    args = SimpleNamespace(**ALLOWED | {"speculative_algorithm": drafts})

    def check(architecture: str) -> None:
        config = SimpleNamespace(architectures=[architecture])
        refusals.check_model(SimpleNamespace(model_path="m", hf_config=config, is_multimodal=False), args)

    check("Qwen3NextForCausalLM")
    if change is None:
        return check("NemotronHForCausalLM")
    with pytest.raises(Int2Error, match=change):
        check("NemotronHForCausalLM")


@pytest.mark.parametrize(
    ("changed", "carried", "change"),
    [
        ({}, True, None),
        ({}, False, "drop --enable-hierarchical-cache"),
        ({"hicache_storage_backend": "file"}, True, None),
        ({"hicache_storage_backend": "nixl"}, True, "set --hicache-storage-backend file"),
        ({"hicache_mem_layout": "layer_first"}, True, "set --hicache-mem-layout page_first"),
    ],
)
def test_host_memory(changed: Any, carried: bool, change: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """States come back with their windows where SGLang takes those along; of storage from files alone."""
    monkeypatch.setattr(refusals, "carries_slot_states", lambda: carried)
    lines = refused(enable_hierarchical_cache=True, **changed)
    assert [line.rpartition("; ")[2] for line in lines] == ([change] if change else [])


def test_windows_are_part_of_state_slots() -> None:
    """SGLang clears, copies, saves and loads them, and its host pool gets every tensor by slot."""
    cache = small_cache(WINDOWS, ROWS, BLOCKS, SLOTS)
    slots, buffers = WindowSlots(cache), [x for of in cache.holdings.values() if of.copies for x in of.units.groups]
    for buffer in buffers:
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) % 251)
    beside, before = [buffer[:, -SLOTS:] for buffer in buffers], [buffer.clone() for buffer in buffers]
    saved = slots.get_cpu_slots(torch.tensor([2]))
    slots.copy_slots(torch.tensor([1]), torch.tensor([2]))
    slots.reset_slots(torch.tensor([1], dtype=torch.int32))
    slots.load_cpu_slots(saved, torch.tensor([3]))
    for windows, old in zip(beside, before, strict=True):
        assert torch.equal(windows[:, 2:], old[:, -SLOTS:][:, 1:3])
        assert not bool(windows[:, 1].any())
    for _, tensor, _, _ in slots.iter_transfer_state_entries():
        assert len(tensor) == SLOTS
        tensor.zero_()
    assert not any(bool(windows.any()) for windows in beside)
    assert all(torch.equal(x[:, :-SLOTS], old[:, :-SLOTS]) for x, old in zip(buffers, before, strict=True))


def test_windows_are_waited_for() -> None:
    """They come with the first layer that has states, by its number on this stage."""
    cache = small_cache(WINDOWS, ROWS, BLOCKS, SLOTS)
    waited: list[int] = []
    table = cache.req_to_token_pool
    table.layer_transfer_counter, table.mamba_map = SimpleNamespace(wait_until=waited.append), {6: 1, 4: 0}
    table.start_layer = 4
    KeptWindows(cache).await_loaded()
    assert waited == [0]


def test_prefill_that_keeps_states_is_taken() -> None:
    assert refused(linear_attn_prefill_backend="flashinfer") == []


@pytest.mark.parametrize("apart", [True, False])
def test_overlap_is_refused_where_states_are_mistaken(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "tells_kept_states_apart", lambda: apart)
    lines = refused(disable_overlap_schedule=False)
    assert [line.rpartition("; ")[2] for line in lines] == ([] if apart else ["set --disable-overlap-schedule"])
    assert refused(disable_overlap_schedule=False, disable_radix_cache=True) == []
    assert refused() == []


@pytest.mark.parametrize("recent", [True, False], ids=["runner", "server_args"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_sglang_finds_a_name_that_it_knows(recent: bool, hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell it puts linear layers beside backends of some names only, whatever they are."""
    monkeypatch.setattr(attention, "linear_config", lambda config: hybrid or None)
    cache = SimpleNamespace()
    monkeypatch.setattr(attention, "cache_of", lambda pool: pool)
    args = SimpleNamespace(attention_backend="oscar")
    runner = SimpleNamespace(token_to_kv_pool=cache, model_config=None, is_draft_worker=False, server_args=args)
    names = dict.fromkeys(known_name.NAMES, "oscar") if recent else {}
    vars(runner).update(names)
    seen = []

    def original(runner: Any, full: Any) -> Any:
        seen.append([getattr(runner, name) for name in names] or [runner.server_args.attention_backend])
        if full is None:
            raise RuntimeError("no memory")
        return full

    stock = stock_attention(None)
    made = attention.around_wrapper(original, runner, stock)
    assert type(made) is (KeepsWindows if hybrid else HybridLinearAttnBackend)
    assert vars(made) == vars(stock)
    with pytest.raises(RuntimeError, match="no memory"):
        attention.around_wrapper(original, runner, None)
    expected = ["triton" if hybrid else "oscar"] * (2 if recent else 1)
    assert seen == [expected, expected]
    assert args.attention_backend == "oscar"
    assert all(getattr(runner, name) == "oscar" for name in names)
    # A server without an INT2 cache is asked for nothing.
    runner.token_to_kv_pool = None
    attention.around_wrapper(original, runner, stock)
    assert seen[-1] == ["oscar"] * len(expected)


def test_other_attention_beside_linear_layers_is_refused() -> None:
    """Windows would not be kept behind drafts, and nobody would know."""
    with pytest.raises(Int2Error, match="another way"):
        KeepsWindows.in_place_of(KeepsWindows.in_place_of(stock_attention(None)))


def test_blackwell_takes_the_name_that_we_give() -> None:
    sets = re.findall(r"(?:allowed|HYBRID_GDN_SM100_BACKENDS) = \{([^}]*)\}", inspect.getsource(attention_registry))
    assert len(sets) == 2
    assert all(f'"{known_name.KNOWN}"' in names for names in sets)


def test_states_are_a_requests_own() -> None:
    states = SimpleNamespace(conv=[torch.zeros(2, 4, 3)], temporal=torch.arange(40.0).view(2, 4, 5))
    table = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=states))
    table.req_index_to_mamba_index_mapping = torch.tensor([0, 3])
    of, config = SimpleNamespace(req_to_token_pool=table), SimpleNamespace(mambaish_config=object())
    (state,) = pool.owns(SimpleNamespace(configurator=config, cache=of)).values()  # type: ignore[arg-type]
    conv, temporal = state.units.read(torch.tensor(state.of(1, 9)))
    assert conv.shape == (2, 1, 3)
    assert torch.equal(temporal[:, 0], states.temporal[:, 3])


def test_rows_are_uploaded_once_for_a_batch() -> None:
    """Uploads count batches (``SeatTables.may_be_written``), also where windows are kept beside states."""
    cache, no = small_cache(WINDOWS, 3, copies=SLOTS, page_size=16), lambda: False
    cache.kept = KeptWindows(cache)
    backend: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    backend._refilled, backend.kernels, backend.cache = None, TorchKernels(), cache
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=no, is_decode=no, is_target_verify=no), mamba_track_mask=None,
        mamba_track_seqlens=None, req_pool_indices=torch.tensor([1]), extend_seq_lens=torch.tensor([3]),
        extend_seq_lens_cpu=[3], extend_prefix_lens=torch.tensor([0]), extend_prefix_lens_cpu=[0],
        positions=torch.arange(3),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    assert cache.seats._uploads == 1
