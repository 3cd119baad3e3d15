"""Where the KV budget goes: properties of the plan, and its arithmetic on a known model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_kernels.cache import Windows
from oscar_kernels.format import LayerFormat, SideFormat, mean_bits
from oscar_kernels.layout import RowLayout
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import GIB, Geometry, row_layouts
from sglang_oscar.memory.part import Part
from sglang_oscar.memory.plan import DEFAULT_MAX_RUNNING, WINDOW_SHARE, MemoryPlan, make_plan
from sglang_oscar.settings import Settings

QWEN3_8B = Geometry.uniform(RowLayout(8, 128, 128), Windows(sink=64, recent=256, ring=256), torch.bfloat16, layers=36)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    head_dim = draw(st.sampled_from([64, 128, 256]))
    group = draw(st.sampled_from([size for size in (32, 64, 128, 256) if size <= head_dim]))
    heads = draw(st.integers(1, 16))
    other = draw(st.sampled_from([group, 32]))
    recent = draw(st.integers(0, 1024))
    windows = Windows(sink=draw(st.sampled_from([0, 16, 64, 128])), recent=recent, ring=recent)
    plain = LayerFormat(heads, head_dim, SideFormat(group), SideFormat(group))
    # Rows of some layers, and of values, may be others.
    mixed = LayerFormat(heads, head_dim, SideFormat(group), SideFormat(other, torch.float32))
    layers = draw(st.integers(1, 100))
    formats = {3 * number: mixed if number % 3 == 1 else plain for number in range(layers)}
    return Geometry(formats, windows, torch.bfloat16)


def test_costs_of_qwen3_8b() -> None:
    """32 code bytes and 4 bytes of scale and zero per head, 8 heads, K and V, 36 layers."""
    assert QWEN3_8B.cell_bytes == 2 * 36 * 8 * 36
    assert mean_bits(QWEN3_8B.formats.values()) == 2.25
    assert QWEN3_8B.full_token_bytes == 2 * 36 * 8 * 128 * 2
    assert QWEN3_8B.ring_bytes == 36 * 2**20
    assert QWEN3_8B.sink_bytes == 9 * 2**20


@pytest.mark.parametrize(("tokens", "bits"), [(8192, 2.25 + 16 * 320 / 8192), (131072, 2.25 + 16 * 320 / 131072)])
def test_effective_bits(tokens: int, bits: float) -> None:
    """Windows of 320 tokens come on top of 2.25 bits for every token."""
    assert QWEN3_8B.bits_per_element(tokens) == pytest.approx(bits)


@given(geometries(), st.integers(0, 200 * GIB), st.none() | st.integers(1, 4096), st.sampled_from([64, 128, 256]))
def test_plan_fits_its_budget(geometry: Geometry, budget: int, max_running: int | None, page_size: int) -> None:
    """Window buffers and two pages of history fit, or the plan is refused; never anything in between."""
    fewest = MemoryPlan(geometry, max_running or 1, budget)
    if fewest.window_bytes + 2 * page_size * geometry.cell_bytes > budget:
        with pytest.raises(Int2Error, match=f"{budget / GIB:.3f} GiB is too small"):
            make_plan(geometry, budget, max_running, page_size)
        return
    plan = make_plan(geometry, budget, max_running, page_size)
    assert plan.window_bytes + 2 * page_size * geometry.cell_bytes <= budget
    assert plan.sink_blocks >= plan.max_running + 1
    assert plan.rings == plan.max_running + 1
    if max_running is not None:
        assert plan.max_running == max_running


@given(geometries(), st.integers(16 * GIB, 400 * GIB))
def test_derived_number_of_requests(geometry: Geometry, budget: int) -> None:
    """It is at least 1, at most the default, and above 1 leaves the larger share of the budget to history."""
    plan = make_plan(geometry, budget, None, 64)
    assert 1 <= plan.max_running <= DEFAULT_MAX_RUNNING
    if plan.max_running > 1:
        assert plan.window_bytes <= WINDOW_SHARE * budget
    if plan.max_running < DEFAULT_MAX_RUNNING:
        more = MemoryPlan(geometry, plan.max_running + 1, budget)
        assert more.window_bytes > WINDOW_SHARE * budget


@dataclass(frozen=True)
class Beside(Part):
    """Something of some bytes, and of more for every request."""

    once: int
    each: int

    def fixed_bytes(self, requests: int) -> int:
        """Both."""
        return self.once + self.each * requests


@given(geometries(), st.integers(16 * GIB, 400 * GIB), st.integers(0, GIB), st.integers(0, GIB // 16))
def test_parts_count_as_window_buffers_do(geometry: Geometry, budget: int, once: int, each: int) -> None:
    """No request more would leave the larger share of the budget to history, and none less is admitted."""
    plan = make_plan(geometry, budget, None, 64, [Beside(once, each)])
    if plan.max_running > 1:
        assert plan.fixed_bytes <= WINDOW_SHARE * budget
    if plan.max_running < DEFAULT_MAX_RUNNING:
        assert replace(plan, max_running=plan.max_running + 1).fixed_bytes > WINDOW_SHARE * budget


def test_more_memory_admits_more_requests() -> None:
    running = [make_plan(QWEN3_8B, gib * GIB, None, 64).max_running for gib in (4, 16, 60, 400)]
    assert running == sorted(running)
    assert running[0] < running[1] < running[2]
    assert running[-1] == DEFAULT_MAX_RUNNING


def test_too_small_budget_says_what_to_change() -> None:
    with pytest.raises(Int2Error) as caught:
        make_plan(QWEN3_8B, 4 * GIB, 200, 64)
    message = str(caught.value)
    assert "4.000 GiB" in message
    assert "200 running requests" in message
    for name in ("--max-running-requests", "SGLANG_MIXED_KV_RECENT_TOKENS", "--mem-fraction-static"):
        assert name in message
    assert "\n" not in message


def test_account_adds_up() -> None:
    plan = make_plan(QWEN3_8B, 40 * GIB, 64, 64)
    history, side, bits = plan.lines(tokens=1_000_000)
    assert f"1000000 tokens x {QWEN3_8B.cell_bytes} bytes = {1_000_000 * QWEN3_8B.cell_bytes / GIB:.3f} GiB" in history
    assert "2.25 bits" in history
    assert f"{(65 * 36 + 129 * 9) / 1024:.3f} GiB of a 40.000 GiB budget" in side
    assert "65 recent rings of 256 tokens, 129 sink blocks of 64 tokens, for at most 64 running requests" in side
    assert bits.endswith("2.88 at 8K, 2.41 at 32K, 2.29 at 128K")


def test_layers_and_sides_are_counted_one_by_one() -> None:
    """A layer of 2.25 and 2.5 bits beside one of 3 and 3: bytes, bits and the account's groups."""
    mixed = {
        5: LayerFormat(8, 128, SideFormat(128), SideFormat(64)),
        2: LayerFormat(8, 128, SideFormat(32), SideFormat(64, torch.float32)),
    }
    geometry = Geometry(mixed, Windows(sink=0, recent=0, ring=0), torch.bfloat16)
    assert geometry.cell_bytes == 8 * (36 + 40 + 48 + 48)
    assert geometry.elements == 4 * 8 * 128
    history = make_plan(geometry, GIB, 1, 64).lines(tokens=1000)[0]
    assert f"1000 tokens x {geometry.cell_bytes} bytes" in history
    assert "2.69 bits per element, group 32, 64, 128" in history


def test_a_side_left_exact_is_counted() -> None:
    exact, coded = SideFormat(128, bits=16), SideFormat(64)
    for value, size, said in (
        (coded, 256 + 40, "9.25 bits per element, group 64; 16"),
        (exact, 512, "16.00 bits per element, 16"),
    ):
        geometry = Geometry({0: LayerFormat(8, 128, exact, value)}, Windows(0, 0, 0), torch.bfloat16)
        assert geometry.cell_bytes == 8 * size
        assert said in make_plan(geometry, GIB, 1, 64).lines(tokens=1000)[0]


def test_the_models_dtype_is_that_of_exact_sides() -> None:
    """Where it computes in float32 that of the windows."""
    args, settings = SimpleNamespace(kv_cache_quant_group_size=None), Settings.from_env({})
    for dtype, wanted in ((torch.float16, torch.float16), (torch.float32, torch.bfloat16)):
        model = SimpleNamespace(head_dim=128, v_head_dim=128, dtype=dtype)
        assert [of.exact_dtype for of in row_layouts(args, settings, model, 8)] == [wanted] * 2


def test_without_windows_nothing_is_set_aside() -> None:
    geometry = Geometry(QWEN3_8B.formats, Windows(sink=0, recent=0, ring=0), torch.bfloat16)
    plan = make_plan(geometry, GIB, None, 64)
    assert plan.window_bytes == 0
    assert plan.max_running == DEFAULT_MAX_RUNNING
