"""Pages of the host tier: what lies where, and copies in both directions by torch and by SGLang's kernels."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oscar_kernels.cache import Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_tools.doctor.host import host_lines
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.hybrids.state_slots import StateSlots
from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.features.tiers import host_releases
from sglang_oscar.features.tiers.arguments import LAYOUTS
from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.pages import DIGEST_BYTES, HALF_PAGE, HostPages, PageLayout, host_line, host_tokens
from sglang_oscar.features.tiers.transfer import KernelTransfer, TorchTransfer, device_pages
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.memory.pool import Int2TokenToKVPool

SLOTS = 192
FORMATS = {
    0: LayerFormat(2, 64, SideFormat(64), SideFormat(64)),
    1: LayerFormat(2, 64, SideFormat(32, bits=3), SideFormat(64, bits=16)),
    2: LayerFormat(2, 64, SideFormat(64), SideFormat(32, torch.float32)),
}
"""Rows of 36, 64, 256 and 64 bytes."""


@st.composite
def page_layouts(draw: st.DrawFn) -> PageLayout:
    layers = draw(st.integers(1, 5))
    rows = st.lists(st.sampled_from([36, 40, 64, 256]), min_size=layers, max_size=layers).map(tuple)
    return PageLayout(draw(st.sampled_from([16, 32, 64, 128, 256])), (draw(rows), draw(rows)))


@given(page_layouts())
def test_items_fill_a_page(layout: PageLayout) -> None:
    """Without gaps, in groups of one size, where kernels can copy them; a token takes a whole, even number of bytes."""
    end = 0
    for item in layout.items:
        assert item.offset == end
        assert item.offset % 64 == 0
        assert item.size == layout.page_size * layout.row_bytes[item.side][item.layer]
        end += item.size
    assert end + layout.trailer_bytes == layout.page_bytes == layout.page_size * layout.token_bytes
    assert layout.token_bytes % 2 == 0
    assert layout.page_bytes % (2 * HALF_PAGE) == 0
    assert layout.trailer_bytes >= DIGEST_BYTES
    assert all(len({item.size for item in group}) == 1 for group in layout.groups)
    assert len({group[0].size for group in layout.groups}) == len(layout.groups)
    assert sorted((item.side, item.layer) for item in layout.items) == [
        (side, layer) for side in (0, 1) for layer in range(layout.layers)
    ]


def memory(layout: PageLayout, pages: int, page_first: bool) -> HostPages:
    return HostPages(layout, torch.zeros(pages * layout.page_bytes, dtype=torch.uint8), page_first)


def device_rows(layout: PageLayout, pages: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        [torch.randint(0, 256, (pages * layout.page_size, 1, rows), generator=generator).byte() for rows in side]
        for side in layout.row_bytes
    )
    return keys, values


@given(page_layouts(), st.booleans(), st.permutations(range(6)), st.permutations(range(6)))
def test_pages_as_storage_has_them(layout: PageLayout, page_first: bool, here: list[int], there: list[int]) -> None:
    """What a page is does not depend on where the host keeps it."""
    rows = device_rows(layout, 6, seed=1)
    first, second = memory(layout, 6, page_first), memory(layout, 6, not page_first)
    TorchTransfer().back_up(first, device_pages(layout, rows), torch.tensor(here), torch.arange(6))
    for one, other in zip(here, there, strict=True):
        page = first.page(one).clone()
        assert page.shape == (layout.page_bytes,)
        page[-layout.trailer_bytes :] = one
        second.set_page(other, page)
        assert torch.equal(second.page(other), page)
    got = device_rows(layout, 6, seed=2)
    for layer in range(layout.layers):
        TorchTransfer().load(second, device_pages(layout, got), layer, torch.tensor(there), torch.arange(6))
    for side, others in zip(rows, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(side, others, strict=True))


def fake_kernels() -> ModuleType:
    """SGLang's kernels as they read in C++: copies of items at addresses, checked like there."""

    def copy(source: int, target: int, size: int) -> None:
        assert size % 8 == 0
        ctypes.memmove(target, source, size)

    def pairs(sources: torch.Tensor, targets: torch.Tensor) -> list[tuple[int, int]]:
        assert sources.dtype == targets.dtype == torch.int64
        return list(zip(sources.tolist(), targets.tolist(), strict=True))

    def per_layer(src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int) -> None:
        for of, to in pairs(src_indices, dst_indices):
            copy(src.data_ptr() + of * item_size, dst.data_ptr() + to * item_size, item_size)

    def per_layer_pf(
        src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int, src_layout_dim: int
    ) -> None:
        for of, to in pairs(src_indices, dst_indices):
            begin = src.data_ptr() + of * src_layout_dim + layer_id * item_size
            copy(begin, dst.data_ptr() + to * item_size, item_size)

    def all_layers(
        src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, item_size: int, num_layers: int
    ) -> None:
        assert src_layers.dtype == dst_layers.dtype == torch.uint64
        assert len(src_layers) == len(dst_layers) == num_layers
        for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
            for of, to in pairs(src_indices, dst_indices):
                copy(source + of * item_size, target + to * item_size, item_size)

    def all_layers_pf(
        src_layers: Any,
        dst: Any,
        src_indices: Any,
        dst_indices: Any,
        item_size: int,
        dst_layout_dim: int,
        num_layers: int,
    ) -> None:
        for layer, source in enumerate(src_layers.tolist()):
            for of, to in pairs(src_indices, dst_indices):
                target = dst.data_ptr() + to * dst_layout_dim + layer * item_size
                copy(source + of * item_size, target, item_size)
        assert len(src_layers) == num_layers

    module = ModuleType("sgl_kernel")
    module.kvcacheio = SimpleNamespace(  # type: ignore[attr-defined]
        transfer_kv_per_layer_mla=per_layer,
        transfer_kv_per_layer_mla_pf_lf=per_layer_pf,
        transfer_kv_all_layer_mla=all_layers,
        transfer_kv_all_layer_mla_lf_pf=all_layers_pf,
    )
    return module


@given(page_layouts(), st.booleans(), st.permutations(range(5)), st.permutations(range(5)))
def test_kernels_are_told_of_pages(layout: PageLayout, page_first: bool, here: list[int], there: list[int]) -> None:
    """Item sizes, addresses and indices that they get copy what torch copies, in both directions."""
    rows, got = device_rows(layout, 5, seed=1), device_rows(layout, 5, seed=2)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sgl_kernel", fake_kernels())
        for transfer in (TorchTransfer(), KernelTransfer()):
            host = memory(layout, 5, page_first)
            for part in (slice(0, 2), slice(2, 5)):  # tables of addresses are used again
                numbers = torch.tensor(here)[part], torch.tensor(there)[part]
                transfer.back_up(host, device_pages(layout, rows), *numbers)
            found.append(host.buffer)
        assert torch.equal(*found)
        for layer in range(layout.layers):
            KernelTransfer().load(host, device_pages(layout, got), layer, torch.tensor(here), torch.tensor(there))
    for side, others in zip(rows, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(side, others, strict=True))


def device_pool(page_size: int = 64) -> Int2TokenToKVPool:
    pool = Int2TokenToKVPool(
        SLOTS, formats=FORMATS, page_size=page_size, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=3
    )
    generator = torch.Generator().manual_seed(3)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=generator))
    return pool


def host_pool(pool: Any, layout: str = "page_first", gigabytes: float = 0, **further: Any) -> Int2HostPool:
    """The host pool as the installed release makes it."""
    if not hasattr(pool, "_mha_buffer_info"):
        return Int2HostPool(pool, 3.0, gigabytes, pool.page_size, layout, **further)
    geometry = {"device_capacity_tokens": pool.size, "start_layer": 0, "end_layer": 3, "draft_buffer_infos": ()}
    source = pool._mha_buffer_info()
    return Int2HostPool(source, 3.0, gigabytes, pool.page_size, layout, **geometry | further)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang wants 10 GiB left over."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_layers_of_different_sizes_come_back(layout: str, io_backend: str) -> None:
    pool = device_pool()
    host = host_pool(pool, layout)
    assert host_releases.device_dtype(pool) == torch.uint8
    assert host.size_per_token == 512 > sum(layer.cell_bytes for layer in FORMATS.values())
    assert host.kv_buffer.nbytes == host.size * host.size_per_token
    slots = torch.cat([torch.arange(page * 64, page * 64 + 64) for page in (3, 1)])
    there = host.alloc(128)
    there = torch.cat([there[64:], there[:64]])
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    host.backup_from_device_all_layer(pool, there, slots, io_backend)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = 0
    for layer in range(3):
        host.load_to_device_per_layer(pool, there, slots, layer, io_backend, is_draft=False)
    assert all(map(torch.equal, before, (*pool.k_buffer, *pool.v_buffer)))
    page = host.get_data_page(there[0])
    fresh = host.get_dummy_flat_data_page()
    assert page.shape == fresh.shape
    fresh.copy_(page)
    host.set_from_flat_data_page(there[64], fresh)
    host.load_to_device_per_layer(pool, there[64:], slots[:64], 1, io_backend)
    assert torch.equal(pool.k_buffer[1], before[1])
    assert torch.equal(pool.v_buffer[1], before[4])


def test_objects_of_storage_are_halves_of_a_page() -> None:
    pool = device_pool()
    host = host_pool(pool)
    begins, sizes = host.get_page_buffer_meta(torch.arange(64, 192))
    page = host.page_layout.page_bytes
    assert sizes == [page // 2] * 4
    assert page // 2 == host.get_ksize_per_token() * 64
    halves = host.get_data_page(64, flat=False)
    assert halves.shape == (2, page // 2)
    assert [half.data_ptr() for half in halves] == begins[:2]
    assert [begin - host.kv_buffer.data_ptr() for begin in begins] == [page, page + page // 2, 2 * page, 5 * page // 2]
    with pytest.raises(ValueError, match="--hicache-mem-layout page_first"):
        host_pool(pool, "layer_first").get_page_buffer_meta(torch.arange(64))


def test_what_cuts_rows_or_pages_is_refused() -> None:
    pool = device_pool()
    with pytest.raises(Int2Error, match="cuts rows"):
        host_pool(pool, "page_head")
    with pytest.raises(Int2Error, match="draft model"):
        host_pool(pool, draft_buffer_infos=(object(),))
    host = host_pool(pool)
    with pytest.raises(Int2Error, match="cut by heads"):
        host.get_split_heads_page_buffer_meta(torch.arange(64), 2)
    with pytest.raises(ValueError, match="whole pages"):
        host.backup_from_device_all_layer(pool, torch.arange(64), torch.arange(1, 65), "direct")


def test_account() -> None:
    layout = PageLayout.of_formats(FORMATS, 64)
    assert layout.row_bytes == ((40, 64, 40), (40, 256, 64))
    assert host_tokens(layout, 0, 2.0, 1000) == 2048
    assert host_tokens(layout, 1, 2.0, 1000) == (1_000_000_000 // layout.token_bytes // 64 + 1) * 64
    assert host_line(1 << 20, layout).startswith("host tier: 1048576 tokens x 512 bytes = 0.500 GiB of host memory")


@pytest.mark.parametrize("gigabytes", [0, 0.001])
def test_windows_have_a_pool_of_their_own(gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are what SGLang makes of both pools; it shares bytes out by what pools take on the device."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _split_hicache_size

    monkeypatch.setattr("sglang_oscar.features.tiers.host_pool.ranks_have_other_parts", lambda: False)
    both = device_pool(), MHATokenToKVPool(
        SLOTS // 3 * 2, page_size=64, dtype=torch.bfloat16, head_num=2, head_dim=64, v_head_dim=32, layer_num=2,
        device="cpu", enable_memory_saver=False, start_layer=0, end_layer=3,
    )  # fmt: skip
    shares = _split_hicache_size(gigabytes, both)
    made = [host_pool(pool, gigabytes=share) for pool, share in zip(both, shares, strict=True)]
    rows = (256, 256), (128, 128)
    windows = WindowPool(rows, torch.bfloat16, 127, 256, 64, interval=1, in_flight=0, ratio=2 / 3)
    plan = MemoryPlan(Geometry(FORMATS, Windows(64, 256, 256), torch.bfloat16), 2, 0, (windows,))
    lines = [host_line(host.size, host.page_layout) for host in made]
    assert host_lines(plan, SLOTS, gigabytes, 3.0) == lines
    assert "2 layers" in lines[1]


def test_states_have_a_pool_of_their_own() -> None:
    """What a hybrid's server of SGLang 0.5.23 with --hicache-size 1 said that it allocates."""
    rows = LayerFormat(2, 64, SideFormat(64), SideFormat(64))
    geometry = Geometry({0: rows, 1: rows}, Windows(64, 256, 256), torch.bfloat16)
    plan = MemoryPlan(geometry, 2, 0, (StateSlots(16, 20992, 327680, 5),))
    cache, states = host_lines(plan, 2560, 1, 0)
    assert cache.startswith("host tier: 2111488 tokens x 256 bytes")
    assert states.startswith("states on the host: 1318 slots x 348672 bytes")


def test_attention_waits_for_its_own_layer() -> None:
    """Counted from the first layer of the pool that SGLang gave out."""
    waited: list[int] = []
    backend: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    counter = SimpleNamespace(wait_until=waited.append)
    backend.token_to_kv_pool = SimpleNamespace(start_layer=4, layer_transfer_counter=counter)
    backend._wait_for_rows(7)
    assert waited == [3]
