"""Pool and window buffers of layers whose rows, or heads, differ: every byte is one layer's and side's own."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.kvcache import cache_move
from sglang.srt.mem_cache import memory_pool

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, StoreSlots, Windows
from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.format import CutFormat, LayerFormat, SideFormat, parts_of
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.build import cached_layers
from sglang_oscar.memory.layer import AnyLayer, CachedLayer
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.window_buffers import WindowBuffers

D, HEADS, PAGE, SIZE = 64, 2, 16, 64
WINDOWS = Windows(sink=8, recent=12, ring=12)
WINDOW_NAMES = ("k_sink", "v_sink", "k_ring", "v_ring")
FORMATS = {
    0: LayerFormat(HEADS, D, SideFormat(64), SideFormat(64)),
    1: LayerFormat(HEADS, D, SideFormat(32), SideFormat(64)),
    2: CutFormat((LayerFormat(1, D, SideFormat(64, bits=4), SideFormat(64)), LayerFormat(1, D, *[SideFormat(64)] * 2))),
    3: LayerFormat(HEADS, D, SideFormat(64), SideFormat(32, torch.float32)),
}
PARTS = parts_of(FORMATS.values())


def made() -> tuple[Int2TokenToKVPool, dict[int, AnyLayer], WindowBuffers]:
    """A pool of four layers with rows of six kinds, one of them in two parts, and its windows."""
    geometry = Geometry(FORMATS, WINDOWS, torch.bfloat16)
    pool = Int2TokenToKVPool(
        SIZE, formats=FORMATS, page_size=PAGE, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=4
    )
    buffers = WindowBuffers(geometry, 3, 4, "cpu")
    return pool, cached_layers(FORMATS, buffers.layer_caches(pool), "cpu"), buffers


def test_bytes_are_those_of_the_formats() -> None:
    pool, _, buffers = made()
    geometry = buffers.geometry
    assert sum(pool.get_kv_size_bytes()) == (SIZE + PAGE) * geometry.cell_bytes
    assert sum(x.nbytes for x in buffers.sinks) == 4 * geometry.sink_bytes
    assert sum(x.nbytes for x in buffers.rings) == 3 * geometry.ring_bytes
    assert [x.shape[0] for x in buffers.rings] == [6, 4], "keys and values of three layers, and of two parts of one"


def test_what_servers_register_is_each_layers_own() -> None:
    """Pages of a layer that are sent by the first one's size would arrive in other places of other layers."""
    pool, _, _ = made()
    pages = [PAGE * part.key_layout.row_bytes for part in PARTS]
    pages += [PAGE * part.value_layout.row_bytes for part in PARTS]
    assert len(set(pages)) == 5
    assert [pool.numbers(layer) for layer in FORMATS] == [[0], [1], [2, 3], [4]]
    addresses, sizes, found = pool.get_contiguous_buf_infos()
    assert found == pages
    assert sizes == [page * (SIZE + PAGE) // PAGE for page in pages]
    assert addresses == [buffer.data_ptr() for buffer in (*pool.k_buffer, *pool.v_buffer)]


@pytest.mark.parametrize(
    ("bits", "heads", "coding"),
    [
        ([(2, 2)] * 2, 8, AFFINE),
        ([(2, 4)] * 2, 8, AFFINE),
        ([(2, 2), (3, 2), (4, 16)], 8, AFFINE),
        ([(2, 2), (2, 3)], 1, SYMMETRIC),
    ],
)
def test_whole_rows_are_moved(
    bits: list[tuple[int, int]], heads: int, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's kernel, on a CPU in Triton's interpreter: also rows that are wider than the first keys or narrow."""
    formats = {
        layer: LayerFormat(
            heads,
            128,
            SideFormat(128, bits=key, coding=coding),
            SideFormat(128, bits=value, coding=AFFINE if value == 16 else coding),
        )
        for layer, (key, value) in enumerate(bits)
    }
    gpu = torch.cuda.is_available()
    if not gpu:
        monkeypatch.setattr(cache_move, "_is_cpu", False)
        monkeypatch.setattr(memory_pool, "copy_all_layer_kv_cache_func", cache_move.copy_all_layer_kv_cache_func)
    pool = Int2TokenToKVPool(
        SIZE, formats=formats, page_size=PAGE, device="cuda" if gpu else "cpu", enable_memory_saver=False,
        start_layer=0, end_layer=len(bits), enable_kv_cache_copy=gpu,
    )  # fmt: skip
    if not gpu:
        set_up_as_on_a_gpu(pool, monkeypatch)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        buffer.random_(0, 256)
    before = [buffer[[20, 25, 30]].clone() for buffer in buffers]
    pool.move_kv_cache(*(torch.tensor(rows, device=pool.device) for rows in ([17, 18, 40], [20, 25, 30])))
    for buffer, rows in zip(buffers, before, strict=True):
        assert torch.equal(buffer[[17, 18, 40]], rows)


def set_up_as_on_a_gpu(pool: Int2TokenToKVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own set-up of a pool that calls itself a GPU's, with tensors of a CPU."""
    stock = memory_pool.MHATokenToKVPool
    original = stock._init_kv_copy_and_warmup

    def on_the_cpu(pool: Int2TokenToKVPool) -> None:
        named, pool.device = pool.device, "cpu"
        original(pool)
        pool.device = named

    pool.use_native_move_kv_cache = False
    with monkeypatch.context() as of_a_gpu:
        of_a_gpu.setattr(pool, "device", torch.device("cuda"))
        of_a_gpu.setattr(stock, "_init_kv_copy_and_warmup", on_the_cpu)
        pool._init_kv_copy_and_warmup()


def test_codebooks_are_in_the_layers_tensors() -> None:
    """As the format has them, and once: what is stored is read back by the reference."""
    points = torch.randn(HEADS, D // 4, 256, 4, generator=torch.Generator().manual_seed(0))
    key = SideFormat(64, coding=CODEBOOK, codebook=Codebook.from_points(points))
    formats = {0: LayerFormat(HEADS, D, key, SideFormat(64, coding=SYMMETRIC)), 1: FORMATS[0]}
    buffers = WindowBuffers(Geometry(formats, WINDOWS, torch.bfloat16), 3, 4, "cpu")
    pool = Int2TokenToKVPool(
        SIZE, formats=formats, page_size=PAGE, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=2
    )
    layers = cached_layers(formats, buffers.layer_caches(pool), "cpu")
    layer, k = layers[0], torch.randn(PAGE, HEADS, D, generator=torch.Generator().manual_seed(1))
    assert layer.cache.k_codebook is layer.format.key.codebook
    assert layers[1].cache.k_codebook is None
    none = torch.full((PAGE,), -1)
    reference.store(layer.cache, StoreSlots(PAGE + torch.arange(PAGE), none, none), k, k, layer.format)
    table, zeros = torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tables = BatchTables(PAGE, table, torch.tensor([PAGE], dtype=torch.int32), zeros, zeros + PAGE, zeros)
    for read, most in zip(reference.gather(layer.cache, tables, 0, PAGE), (0.2, 0.15), strict=True):
        error = (read[WINDOWS.sink :] - k[WINDOWS.sink :]).square().mean()
        assert error < most


def test_layers_do_not_share_bytes() -> None:
    """Every tensor filled with a number of its own keeps it; together they are all of the memory."""
    pool, layers, buffers = made()
    caches = [part.cache for layer in layers.values() for part in layer.parts]
    tensors = [getattr(cache, name) for cache in caches for name in WINDOW_NAMES]
    tensors += [x for cache in caches for x in (cache.k_rows, cache.v_rows)]
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, start=1):
        assert (tensor == number).all()
    assert all((x > 0).all() for x in (*buffers.sinks, *buffers.rings))
    assert all((x > 0).all() for x in (*pool.k_buffer, *pool.v_buffer))


def test_rows_are_each_layers_own() -> None:
    """What is stored is read back in each side's layout, also after SGLang has moved a page's rows."""
    pool, layers, _ = made()
    k, v = (torch.randn(PAGE, HEADS, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    none = torch.full((PAGE,), -1)
    parts = [(part, first) for layer in layers.values() for first, part in enumerate(layer.parts)]

    def own(x: torch.Tensor, part: CachedLayer, first: int) -> torch.Tensor:
        return x[:, first : first + part.cache.kv_heads]

    for part, first in parts:
        slots = StoreSlots(PAGE + torch.arange(PAGE), none, none)
        reference.store(part.cache, slots, own(k, part, first), own(v, part, first), part.format)
    pool.use_native_move_kv_cache = True  # needs no GPU
    pool.move_kv_cache(3 * PAGE + torch.arange(PAGE), PAGE + torch.arange(PAGE))
    found = [rows for layer_id in layers for rows in pool.rows(layer_id)]
    for (part, first), both in zip(parts, found, strict=True):
        layouts = part.format.key_layout, part.format.value_layout
        for x, layout, rows in zip((own(k, part, first), own(v, part, first)), layouts, both, strict=True):
            assert rows.shape == (SIZE + PAGE, layout.row_bytes)
            wanted = decode_rows(encode_rows(x, layout, 1.0), layout)
            for page in (1, 3):
                assert torch.equal(decode_rows(rows[page * PAGE : (page + 1) * PAGE], layout), wanted)
