"""Heads of keys and of values that differ in size: formats, rows, windows, memory and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.format import CutFormat, LayerFormat, SideFormat, fingerprint
from oscar_kernels.transform import SideTransform
from oscar_rotation.math.hadamard import hadamard
from sglang_oscar.attach import refusals
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import Geometry, row_layouts
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.window_buffers import WindowBuffers
from sglang_oscar.settings import Settings

MODEL = SimpleNamespace(head_dim=192, v_head_dim=128, dtype=torch.bfloat16)
WINDOWS = Windows(sink=64, recent=256, ring=256)
HADAMARD = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}


def layouts(group: int | None = None) -> Any:
    return row_layouts(SimpleNamespace(kv_cache_quant_group_size=group), Settings.from_env({}), MODEL, 4)


def formats() -> dict[int, Any]:
    keys, values = layouts()
    return dict(load_formats(Settings.from_env(HADAMARD), keys, [1, 3], value_layout=values))


def test_groups_divide_the_heads_of_a_side() -> None:
    """Unasked they are the largest that do; one that does not is refused in a line that names the flag."""
    assert [(layout.head_dim, layout.group_size) for layout in layouts()] == [(192, 64), (128, 128)]
    assert [layout.group_size for layout in layouts(32)] == [32, 32]
    assert [layout.head_bytes for layout in layouts()] == [48 + 3 * 4, 32 + 4]
    with pytest.raises(Int2Error, match=r"--kv-cache-quant-group-size 128: .* divides head_dim 192"):
        layouts(128)


def test_each_side_has_matrices_of_its_size() -> None:
    made = formats()[3]
    assert (made.head_dim, made.value_head_dim) == (192, 128)
    assert torch.equal(made.key.transform.matrix, hadamard(192).float())
    assert torch.equal(made.value.transform.matrix, hadamard(128).float())
    assert made.elements == 4 * (192 + 128)
    own = made.of_heads(slice(1, 3))
    assert (own.kv_heads, own.head_dim, own.value_head_dim) == (2, 192, 128)
    with pytest.raises(ValueError, match="the value transform is for 4 kv heads of 192, the layer has 4 of 128"):
        made.with_transforms(SideTransform(), SideTransform(torch.eye(192)))


def test_values_have_heads_that_are_powers_of_two() -> None:
    with pytest.raises(ValueError, match="heads of values must have 64, 128 or 256 channels, got 192"):
        LayerFormat(4, 192, SideFormat(64), SideFormat(64))
    parts = [LayerFormat(2, 192, SideFormat(64), SideFormat(64), channels) for channels in (64, 128)]
    with pytest.raises(ValueError, match="heads of one size"):
        CutFormat(tuple(parts))


def test_rows_of_other_value_heads_are_others() -> None:
    side = SideFormat(64)
    made = [fingerprint({0: LayerFormat(4, 128, side, side, channels)}) for channels in (0, 128, 64)]
    assert made[0] == made[1] != made[2]


def test_windows_and_pools_have_room_for_each() -> None:
    """Keys and values of a layer lie in tensors of their own; the account counts what is allocated."""
    geometry = Geometry(formats(), WINDOWS, torch.bfloat16)
    buffers = WindowBuffers(geometry, rings=3, sink_blocks=5, device="cpu")
    pool = Int2TokenToKVPool(
        128, formats=geometry.formats, page_size=64, device="cpu", enable_memory_saver=False, start_layer=0,
        end_layer=3, enable_kv_cache_copy=False,
    )  # fmt: skip
    caches = [part for layer in buffers.layer_caches(pool).values() for part in layer]
    assert [tuple(cache.k_ring.shape) for cache in caches] == [(3, 256, 4, 192)] * 2
    assert [tuple(cache.v_sink.shape) for cache in caches] == [(5, 64, 4, 128)] * 2
    tensors = [x for cache in caches for x in (cache.k_ring, cache.v_ring, cache.k_sink, cache.v_sink)]
    for number, x in enumerate(tensors):
        x.fill_(number)
    assert [float(x.min()) for x in tensors] == [float(x.max()) for x in tensors] == list(map(float, range(8)))
    assert sum(x.nbytes for x in buffers.rings) == 3 * geometry.ring_bytes
    assert sum(x.nbytes for x in buffers.sinks) == 5 * geometry.sink_bytes
    assert [x.shape[1:].numel() for x in pool.k_buffer + pool.v_buffer] == [4 * 60] * 2 + [4 * 36] * 2
    assert geometry.cell_bytes == 2 * 4 * (60 + 36)


@pytest.mark.parametrize(("heads", "served"), [((192, 128), True), ((128, 192), False), ((192, 192), False)])
def test_sizes_that_were_tried_are_served(heads: tuple[int, int], served: bool) -> None:
    refused, what = next(row for row in refusals.MODELS if "a head_dim other" in row[1])
    assert refused(SimpleNamespace(head_dim=heads[0], v_head_dim=heads[1])) != served
    assert "192 of keys and 128 of values" in what


@pytest.mark.parametrize(
    ("mode", "backend", "wrong"),
    [("prefill", "nixl", True), ("decode", "nixl", True), ("decode", "mooncake", False), ("null", "nixl", False)],
)
def test_they_are_not_sent_over_nixl(mode: str, backend: str, wrong: bool) -> None:
    ((refused, what),) = refusals.UNEQUAL
    assert refused(SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend)) == wrong
    assert what in refusals.rows()["Heads of two sizes"]


def test_the_cuda_kernels_leave_them_to_triton() -> None:
    """In the words that the log has at start-up."""
    keys, values = layouts()
    variant = Variant(keys, values, WINDOWS, 16, 64, torch.bfloat16, torch.bfloat16)
    assert variant.unsupported() == "heads of keys and values that differ in size"
    equal = Variant(values, values, WINDOWS, 16, 64, torch.bfloat16, torch.bfloat16)
    assert equal.unsupported() is None
