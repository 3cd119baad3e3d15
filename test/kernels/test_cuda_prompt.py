"""The Hopper kernel that stores prompts against the reference; without a GPU it runs thread by thread on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import Shape, empty_cache, random_rotation, random_slots, random_transform, random_vectors
from store_cases import (
    assert_correctly_rounded,
    assert_fitted,
    assert_narrowed,
    assert_next_to_reference,
    exact,
    split_rows,
)
from test_cuda_variants import variant

from oscar_kernels import reference
from oscar_kernels.cache import Copies, LayerCache, StoreSlots, Windows
from oscar_kernels.cuda.prompt import TILE, _cut, arrange, defines, store
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store as triton_store
from support.cuda_emulator import COMPILER, emulated
from support.hopper import HOPPER
from support.spills import spilled_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = Windows(16, 24, 32)
CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if HOPPER else CPU
runs = pytest.mark.skipif(not HOPPER and COMPILER is None, reason="needs a Hopper GPU or a compiler")

SHAPES = [
    Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=32),
    Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3),
    Shape(kv_heads=3, gqa=2, head_dim=128, group=64, windows=WINDOWS, page_size=32, k_bits=4, v_group=32,
          scale_dtype=FP32),
    Shape(kv_heads=1, gqa=5, head_dim=128, group=32, windows=Windows(0, 0, 0), page_size=32, v_bits=3, dtype=FP16,
          scale_dtype=FP16),
]  # fmt: skip


@pytest.fixture
def blocks() -> Callable[[int], Any]:
    """How many multiprocessors there are, where none is there."""
    return (lambda count: nullcontext()) if HOPPER else emulated


def stored(
    shape: Shape, tokens: int, key: SideTransform, value: SideTransform, k: torch.Tensor, v: torch.Tensor, **more: Any
) -> tuple[LayerCache, LayerCache, StoreSlots, torch.Tensor | None]:
    """A cache that the kernel has written, the reference's, slots, and what the kernel returned."""
    pages, requests = -(-tokens // shape.page_size) + 1, max(2, tokens // 8)
    slots = random_slots(tokens, shape.windows, pages * shape.page_size, requests, DEVICE)
    cache = empty_cache(shape, pages, requests, DEVICE, fill=7.0)
    plain = empty_cache(shape, pages, requests, CPU, fill=7.0)
    layer = shape.format(key, value)
    arranged = arrange(prepare(layer, shape.dtype), shape.q_heads, shape.page_size)
    out = store(cache, slots, k, v, arranged, **more)
    # PyTorch divides by a constant inexactly on a GPU.
    on_cpu = StoreSlots(slots.row.cpu(), slots.ring.cpu(), slots.sink.cpu())
    reference.store(plain, on_cpu, k.cpu(), v.cpu(), layer.to("cpu"))
    return cache, plain, slots, out


@runs
@pytest.mark.parametrize("rotated", ["keys and values", "keys", "per head"])
@pytest.mark.parametrize("clip", [0.96, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: Shape, clip: float, rotated: str, blocks: Callable[[int], Any]) -> None:
    """More vectors than a block has at a time, and a tile that is not full."""
    tokens, sets = 300 // shape.kv_heads + 7, shape.kv_heads if rotated == "per head" else None
    heads = shape.q_heads + 2 * shape.kv_heads
    fused = random_vectors((tokens, heads, 128), shape.dtype, 1, DEVICE)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    rk, rq = (x.to(DEVICE) for x in random_transform(128, 2, sets))
    rv = None if rotated == "keys" else random_transform(128, 3, sets)[0].to(DEVICE)
    center = torch.randn(shape.kv_heads, 128, device=DEVICE) if sets else None
    rows = torch.randperm(tokens + 3, device=DEVICE)[:tokens]
    rows[5] = -1
    copied = [torch.zeros(tokens + 3, shape.kv_heads + 1, 128, dtype=shape.dtype, device=DEVICE) for _ in range(2)]
    copies = Copies(*(x[:, : shape.kv_heads] for x in copied), rows)
    with blocks(5 if sets is None else 3 * shape.kv_heads):
        cache, plain, slots, q_rot = stored(
            shape, tokens, SideTransform(rk, rq, center, clip), SideTransform(rv, clip=clip), k, v, q=q, copies=copies
        )
    for x, matrix, offset, name in ((k, rk, center, "k"), (v, rv, None, "v")):
        got = getattr(cache, f"{name}_rows")
        whole = exact(x, matrix)
        y = whole if offset is None else whole - offset.double()
        length = torch.maximum(whole.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True))
        assert_correctly_rounded(got[slots.row], y, shape.layout_of(name), clip, length)
        assert_next_to_reference(cache, plain, name, shape.layout_of(name), slots)
        copy, kept = copied["kv".index(name)], rows >= 0
        torch.testing.assert_close(copy[rows[kept], :-1].double(), y[kept], rtol=2**-7, atol=2e-4)
        copy[rows[kept], :-1] = 0
        assert not copy.any()
    assert q_rot is not None
    assert_narrowed(q_rot, exact(q, rq), shape.dtype)


@runs
@pytest.mark.parametrize("clip", [0.88, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fitted_rows(shape: Shape, clip: float, blocks: Callable[[int], Any]) -> None:
    """Codes are those of plain rows; scales and zero points are fitted to them, to each side's own gain."""
    k, v = (random_vectors((37, shape.kv_heads, 128), shape.dtype, seed, DEVICE) for seed in (1, 2))
    rotation, rows = random_rotation(128, 2, DEVICE), []
    with blocks(3):
        for gains in ((0.98, 1.0), (0.0, 0.0)):
            sides = SideTransform(rotation, clip=clip, gain=gains[0]), SideTransform(clip=clip, gain=gains[1])
            cache, _, slots, _ = stored(shape, 37, *sides, k, v)
            rows.append((cache.k_rows[slots.row], cache.v_rows[slots.row]))
    for x, matrix, name, gain, fitted, plain in zip((k, v), (rotation, None), "kv", (0.98, 1.0), *rows, strict=True):
        assert_fitted(fitted, plain, exact(x, matrix), shape.layout_of(name), gain)


def odd_vectors(shape: Shape) -> torch.Tensor:
    """Few magnitudes beside many, numbers of one sign, zeros, outliers, NaNs: whatever takes a way of its own, side by
    side in tiles."""
    k = random_vectors((61, shape.kv_heads, 128), FP32, 1, CPU)
    few = torch.randint(-3, 4, k.shape, generator=torch.Generator().manual_seed(0)) / 4
    k = torch.where((torch.arange(61) % 3 == 0)[:, None, None], few, k)
    k[7], k[8], k[9] = 0, 7, k[9].abs() + 0.5
    k[10], k[11, :, ::32] = -k[10].abs() - 0.5, 1000
    k[12, :, :5] = torch.tensor([1.0, 5.0, 30.0, 200.0, 5000.0])
    k[13, 0, 7], k[14, -1, 100] = float("nan"), -float("nan")
    k[15, :, 64:] = k[15, :, 64:].abs() + 0.25
    return k.to(shape.dtype).to(DEVICE)


@runs
@pytest.mark.parametrize("clip", [0.96, 0.88, 0.7, 0.01, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_rotation_rows_are_those_of_the_other_kernel(
    shape: Shape, clip: float, blocks: Callable[[int], Any]
) -> None:
    """Nothing rounds before the codec, so any order of summation gives the same; scales are the reference's, too."""
    k, sides = odd_vectors(shape), [SideTransform(clip=clip)] * 2
    with blocks(3):
        cache, plain, slots, _ = stored(shape, len(k), *sides, k, -k)
    other = empty_cache(shape, len(k) // shape.page_size + 2, max(2, len(k) // 8), DEVICE)
    triton_store(other, slots, k, -k, prepare(shape.format(*sides), shape.dtype))
    for name in ("k_rows", "v_rows"):
        # Numbers, not bytes: a zero point of 0 may have either sign.
        mine, theirs, wanted = (
            split_rows(getattr(of, name).cpu()[slots.row.cpu()], shape.layout_of(name)) for of in (cache, other, plain)
        )
        for got, want in zip((*mine, *mine[1:]), (*theirs, *wanted[1:]), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@runs
def test_is_the_same_on_any_gpu(blocks: Callable[[int], Any]) -> None:
    shape, found = SHAPES[1], []
    k = random_vectors((90, 8, 128), BF16, 1, DEVICE)
    matrices = ((x.to(DEVICE) for x in random_transform(128, seed, 8)) for seed in (1, 2))
    sides = [SideTransform(*both, clip=0.96, gain=0.98) for both in matrices]
    for multiprocessors in (1, 40, 4096):
        with blocks(multiprocessors):
            cache, *_ = stored(shape, 90, *sides, k, k)
        found.append([getattr(cache, f"{of}_{part}") for of in "kv" for part in ("rows", "ring", "sink")])
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


def test_all_blocks_are_taken_where_there_are_tiles_for_them() -> None:
    for tokens in (1, 5, 64, 100, 1000, 8192, 100_000):
        for heads in ((8, 8, 0), (8, 8, 32), (2, 2, 12), (1, 1, 8)):
            for sets in ((1, 1, 1), (heads[0],) * 3, (1, heads[0], 1)):
                blocks = _cut(tokens, heads, sets, 132)
                assert sum(blocks) <= max(132, sum(sets))
                for taken, of, own in zip(blocks, heads, sets, strict=True):
                    assert taken % own == 0
                    assert (taken > 0) == (of > 0)
                    assert taken // own <= -(-tokens * (of // own) // TILE)
                if tokens >= 8192:
                    assert sum(blocks) > 132 - max(sets)


def test_other_vectors_are_refused() -> None:
    shape = SHAPES[0]
    layer = arrange(prepare(shape.format(), BF16), 32, 32)
    slots = random_slots(2, shape.windows, 64, 2, CPU)
    cache = empty_cache(shape, 2, 2, CPU)
    k = torch.zeros(2, 8, 132, dtype=BF16)[:, :, :128]
    with pytest.raises(ValueError, match=r"k must be .* multiples of 16 bytes"):
        store(cache, slots, k, k, layer)
    symmetric = replace(shape, v_coding="symmetric")
    with pytest.raises(ValueError, match="does not support rows without zero points"):
        store(empty_cache(symmetric, 2, 2, CPU), slots, k, k, arrange(prepare(symmetric.format(), BF16), 32, 32))


@pytest.mark.parametrize(
    ("bits", "sets", "dtype", "most"),
    [
        ((3, 2), 8, BF16, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((2, 2), None, BF16, 0), ((4, 4), 8, BF16, 0), ((4, 4), 8, FP16, 32))
        ),
    ],
)
def test_spills_next_to_nothing(bits: tuple[int, int], sets: int | None, dtype: torch.dtype, most: int) -> None:
    shape = replace(SHAPES[0], windows=Windows(64, 256, 256), page_size=64, k_bits=bits[0], v_bits=bits[1], dtype=dtype)
    sides = [SideTransform(*random_transform(128, seed, sets), gain=0.98, clip=0.9) for seed in (1, 2)]
    sides[0] = replace(sides[0], center=torch.zeros(8, 128))
    assert spilled_bytes("prompt.cu", dict(defines(variant(shape), prepare(shape.format(*sides), dtype)))) <= most
