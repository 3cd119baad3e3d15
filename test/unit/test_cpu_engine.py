"""The allocator methods for machines without a GPU against SGLang's own slow version, and on their own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive

from oscar_cpu import engine
from oscar_cpu.draft_attention import DraftSteps
from oscar_cpu.engine import around_alloc_decode, around_alloc_extend, around_support_triton

REQUESTS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=6)
PAGE_SIZES = st.sampled_from([16, 64, 128])


def never(*args: Any) -> Any:
    """Stands for the Triton version, which no CPU tensor may reach."""
    raise AssertionError("the Triton version was called")


def make_allocator(slots: int, page_size: int, need_sort: bool = False) -> PagedTokenToKVPoolAllocator:
    """An allocator that knows no other way than Triton, as in older releases."""
    made = PagedTokenToKVPoolAllocator(slots, page_size, torch.uint8, "cpu", SimpleNamespace(), need_sort=need_sort)
    vars(made).pop("use_triton_kernels", None)
    return made


class Requests:
    """Requests that hold ``prefix`` slots each, and an allocator with ``spare`` pages beyond what they hold."""

    def __init__(self, prefixes: list[int], page_size: int, spare: int) -> None:
        held = sum(-(-prefix // page_size) for prefix in prefixes)
        self.page_size = page_size
        self.allocator = make_allocator((held + spare) * page_size, page_size)
        order = self.allocator.free_pages.tolist()
        random.Random(held * 31 + spare).shuffle(order)
        self.allocator.free_pages = torch.tensor(order[held:], dtype=torch.int64)
        pages = iter(order)
        self.slots: list[list[int]] = []
        for prefix in prefixes:
            mine = [next(pages) for _ in range(-(-prefix // page_size))]
            self.slots.append([mine[i // page_size] * page_size + i % page_size for i in range(prefix)])

    def extend(self, lengths: list[int]) -> torch.Tensor | None:
        """Grow every request by ``lengths``; remembers the slots."""
        prefix = torch.tensor([len(slots) for slots in self.slots])
        seq = prefix + torch.tensor(lengths)
        last = torch.tensor([slots[-1] if slots else -1 for slots in self.slots])
        out = around_alloc_extend(never, self.allocator, prefix, prefix, seq, seq, last, sum(lengths))
        if out is not None:
            for slots, part in zip(self.slots, out.split(lengths), strict=True):
                slots.extend(part.tolist())
        return out

    def decode(self) -> torch.Tensor | None:
        """Grow every request by one."""
        seq = torch.tensor([len(slots) + 1 for slots in self.slots])
        last = torch.tensor([slots[-1] for slots in self.slots])
        out = around_alloc_decode(never, self.allocator, seq, seq, last)
        if out is not None:
            for slots, slot in zip(self.slots, out.tolist(), strict=True):
                slots.append(slot)
        return out

    def check(self) -> None:
        """No slot is held twice or free as well; every request fills its pages in order; page 0 is nobody's."""
        every = [slot for slots in self.slots for slot in slots]
        assert len(set(every)) == len(every)
        free = set(self.allocator.free_pages.tolist())
        assert not free & {slot // self.page_size for slot in every}
        assert all(slot >= self.page_size for slot in every)
        for slots in self.slots:
            for position, slot in enumerate(slots):
                assert slot % self.page_size == position % self.page_size
                if position % self.page_size:
                    assert slot == slots[position - 1] + 1


@given(REQUESTS, PAGE_SIZES)
def test_extend_equals_sglang(requests: list[tuple[int, int]], page_size: int) -> None:
    """Same slots as ``alloc_extend_naive`` from the same free list."""
    prefixes, lengths = [p for p, _ in requests], [n for _, n in requests]
    state = Requests(prefixes, page_size, spare=200)
    prefix = torch.tensor(prefixes)
    last = torch.tensor([slots[-1] if slots else -1 for slots in state.slots])
    expected = torch.empty(sum(lengths), dtype=torch.int64)
    alloc_extend_naive(
        prefix, prefix + torch.tensor(lengths), last, state.allocator.free_pages, expected, page_size, "cpu"
    )
    got = state.extend(lengths)
    assert got is not None
    assert got.dtype == torch.int64
    assert torch.equal(got, expected)
    state.check()


@settings(max_examples=50)
@given(REQUESTS, PAGE_SIZES, st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_sequences_of_extend_and_decode(
    requests: list[tuple[int, int]], page_size: int, steps: list[bool], spare: int
) -> None:
    """Prefills and decode steps in any order keep all properties; what does not fit changes nothing."""
    state = Requests([p for p, _ in requests], page_size, spare)
    for is_decode in steps:
        free = state.allocator.free_pages.tolist()
        if is_decode and all(state.slots):
            needed, out = sum(len(slots) % page_size == 0 for slots in state.slots), state.decode()
        else:
            lengths = [n for _, n in requests]
            pairs = zip(state.slots, lengths, strict=True)
            needed = sum(-(-(len(slots) + n) // page_size) - -(-len(slots) // page_size) for slots, n in pairs)
            out = state.extend(lengths)
        left = state.allocator.free_pages.tolist()
        assert (out is None) == (needed > len(free))
        assert left == (free if out is None else free[needed:])
        state.check()


def test_freed_pages_are_merged_when_needed() -> None:
    """With sorting (disaggregation and others) freed pages wait in a second list."""
    allocator = make_allocator(4 * 16, 16, need_sort=True)
    zero, seq, last = torch.tensor([0]), torch.tensor([64]), torch.tensor([-1])
    slots = around_alloc_extend(never, allocator, zero, zero, seq, seq, last, 64)
    allocator.free(slots)
    assert len(allocator.free_pages) == 0
    again = around_alloc_extend(never, allocator, zero, zero, seq, seq, last, 64)
    assert sorted(again.tolist()) == sorted(slots.tolist())
    allocator.free(again)
    decoded = around_alloc_decode(never, allocator, torch.tensor([1]), torch.tensor([1]), last)
    assert decoded.tolist() == [16]


@pytest.mark.parametrize("method", [around_alloc_extend, around_alloc_decode])
@pytest.mark.parametrize("fields", [{"device": "cuda"}, {"device": "cpu", "use_triton_kernels": False}])
def test_allocators_that_work_are_left_alone(method: Any, fields: dict[str, Any]) -> None:
    """Those of a GPU, and those that have a way without Triton."""
    calls = []
    arguments = 7 if method is around_alloc_extend else 3
    allocator = SimpleNamespace(**fields)
    method(lambda *args, **kwargs: calls.append((args, kwargs)), allocator, *range(arguments))
    assert len(calls) == 1
    assert calls[0][0][: arguments + 1] == (allocator, *range(arguments))


def test_other_backends_keep_their_triton_support() -> None:
    assert around_support_triton(lambda backend: True, "triton") is True
    assert around_support_triton(lambda backend: False, "torch_native") is False


@pytest.mark.parametrize("step", [0, 2])
def test_steps_of_drafting_attend_to_the_drafts_before(step: int) -> None:
    """SGLang's batch keeps the lengths of the first step; what lies behind the newest draft must not be read."""
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 40, 2, 64, generator=generator)
    queries, lens = torch.randn(2, 4, 64, generator=generator), [5, 9]
    ends = [length + step + 1 for length in lens]
    for request, end in enumerate(ends):
        keys[20 * request + end : 20 * request + 20] = float("nan")
    pool = SimpleNamespace(get_key_buffer=lambda layer_id: keys, get_value_buffer=lambda layer_id: values)
    rows = SimpleNamespace(req_to_token=torch.arange(40).view(2, 20))
    runner = SimpleNamespace(device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool)
    layer = SimpleNamespace(
        qk_head_dim=64, v_head_dim=64, tp_q_head_num=4, tp_k_head_num=2, layer_id=0, scaling=0.125,
        is_cross_attention=False, sliding_window_size=-1,
    )  # fmt: skip
    batch = SimpleNamespace(
        seq_lens=torch.tensor(lens), out_cache_loc=None, req_pool_indices=torch.arange(2), encoder_lens=None
    )
    steps = DraftSteps(runner, 4)
    assert len(steps.attn_backends) == 3
    out = steps.attn_backends[step].forward_decode(queries, None, None, layer, batch).view(2, 4, 64)
    for request, end in enumerate(ends):
        k, v = (x[20 * request : 20 * request + end].repeat_interleave(2, 1) for x in (keys, values))
        weights = torch.einsum("hd,nhd->hn", queries[request], k).mul(0.125).softmax(-1)
        torch.testing.assert_close(out[request], torch.einsum("hn,nhd->hd", weights, v))
    assert batch.seq_lens.tolist() == lens


def test_draft_models_keep_their_backends_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU in int2 mode only, steps are ours; a chain of one draft has none."""

    def factory(device: str, steps: int) -> SimpleNamespace:
        runner = SimpleNamespace(device=device, req_to_token_pool=None, token_to_kv_pool=None)
        return SimpleNamespace(draft_model_runner=runner, speculative_num_steps=steps)

    for mode, device, ours in [
        (SimpleNamespace(), "cpu", True),
        (SimpleNamespace(), "cuda", False),
        (None, "cpu", False),
    ]:
        monkeypatch.setattr(engine, "active", lambda mode=mode: mode)
        made = [engine.around_create_decode_backend(lambda one: "stock", factory(device, steps)) for steps in (1, 3)]
        extend = engine.around_create_extend_backend(lambda one: "stock", factory(device, 3))
        if ours:
            assert (made[0], len(made[1].attn_backends), extend) == (None, 2, None)
        else:
            assert (made, extend) == (["stock", "stock"], "stock")
