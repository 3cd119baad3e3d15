"""Pool and side buffers of layers whose rows, or heads, differ: every byte is one layer's and side's own."""

from __future__ import annotations

import torch

from oscar_kernels import reference
from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.format import LayerFormat, SideFormat
from sglang_oscar.memory.build import cached_layers
from sglang_oscar.memory.geometry import Geometry
from sglang_oscar.memory.layer import CachedLayer
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.side_buffers import SideBuffers

D, HEADS, PAGE, SIZE = 64, 2, 16, 64
WINDOWS = Windows(sink=8, recent=12, ring=12)
WINDOW_NAMES = ("k_sink", "v_sink", "k_ring", "v_ring")
FORMATS = {
    0: LayerFormat(HEADS, D, SideFormat(64), SideFormat(64)),
    1: LayerFormat(HEADS, D, SideFormat(32), SideFormat(64)),
    2: LayerFormat(HEADS, D, SideFormat(64), SideFormat(32, torch.float32)),
}


def made() -> tuple[Int2TokenToKVPool, dict[int, CachedLayer], SideBuffers]:
    """A pool of three layers with rows of four kinds, and its windows."""
    geometry = Geometry(FORMATS, WINDOWS, torch.bfloat16)
    pool = Int2TokenToKVPool(
        SIZE, formats=FORMATS, page_size=PAGE, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=3
    )
    buffers = SideBuffers(geometry, 3, 4, "cpu")
    return pool, cached_layers(FORMATS, buffers.layer_caches(pool), "cpu", absorbed=False), buffers


def test_bytes_are_those_of_the_formats() -> None:
    pool, _, buffers = made()
    geometry = buffers.geometry
    assert sum(pool.get_kv_size_bytes()) == (SIZE + PAGE) * geometry.cell_bytes
    assert buffers.sink.nbytes == 4 * geometry.sink_bytes
    assert buffers.ring.nbytes == 3 * geometry.ring_bytes


def test_layers_do_not_share_bytes() -> None:
    """Every tensor filled with a number of its own keeps it; together they are all of the memory."""
    pool, layers, buffers = made()
    tensors = [getattr(layer.cache, name) for layer in layers.values() for name in WINDOW_NAMES]
    tensors += [x for layer in layers.values() for x in (layer.cache.k_rows, layer.cache.v_rows)]
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, start=1):
        assert (tensor == number).all()
    assert (buffers.sink > 0).all()
    assert (buffers.ring > 0).all()
    assert all((x > 0).all() for x in (*pool.k_buffer, *pool.v_buffer))


def test_rows_are_each_layers_own() -> None:
    """What is stored is read back in each side's layout, also after SGLang has moved a page's rows."""
    pool, layers, _ = made()
    k, v = (torch.randn(PAGE, HEADS, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    none = torch.full((PAGE,), -1)
    for layer in layers.values():
        reference.store(layer.cache, StoreSlots(PAGE + torch.arange(PAGE), none, none), k, v, layer.format)
    pool.use_native_move_kv_cache = True  # needs no GPU
    pool.move_kv_cache(3 * PAGE + torch.arange(PAGE), PAGE + torch.arange(PAGE))
    for layer_id, layer in layers.items():
        for x, layout, rows in zip(
            (k, v), (layer.format.key_layout, layer.format.value_layout), pool.rows(layer_id), strict=True
        ):
            assert rows.shape == (SIZE + PAGE, layout.row_bytes)
            wanted = decode_rows(encode_rows(x, layout, 1.0), layout)
            for page in (1, 3):
                assert torch.equal(decode_rows(rows[page * PAGE : (page + 1) * PAGE], layout), wanted)
