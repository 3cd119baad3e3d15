"""The Hopper kernel that turns cached prefixes into 16 bits; without a GPU it runs thread by thread on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernel_cases import OF_16_BITS, OF_OTHER_CODINGS, Shape, assert_copies_equal_the_cache, filled_batch, poison

from oscar_kernels.cache import Windows
from oscar_kernels.cuda.prefix import copy_prefixes, defines, rows_of_warp, variant_of
from oscar_kernels.layout import SYMMETRIC
from oscar_kernels.spans import Spans
from sglang_oscar.attention.prefix_copies import PrefixCopies
from support.cuda_emulator import COMPILER, emulated
from support.hopper import HOPPER
from support.spills import spilled_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = Windows(16, 24, 32)
DEVICE = torch.device("cuda" if HOPPER else "cpu")
runs = pytest.mark.skipif(not HOPPER and COMPILER is None, reason="needs a Hopper GPU or a compiler")

SHAPES = [
    Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3),
    Shape(kv_heads=2, head_dim=128, group=32, windows=WINDOWS, page_size=64, k_bits=4, v_group=64, scale_dtype=FP32),
    Shape(kv_heads=1, head_dim=256, group=128, windows=WINDOWS, page_size=32, v_bits=3, v_group=32),
    Shape(kv_heads=3, head_dim=64, group=64, windows=WINDOWS, page_size=32, v_bits=4, dtype=FP16, scale_dtype=FP16),
    # Rows that begin at multiples of two bytes only.
    Shape(kv_heads=1, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3, k_coding=SYMMETRIC,
          v_coding=SYMMETRIC),
    Shape(kv_heads=2, head_dim=64, group=32, windows=Windows(0, 0, 0), page_size=32, k_bits=3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    """The CUDA kernels run on the CPU where there is no GPU for them."""
    with nullcontext() if HOPPER else emulated():
        yield


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_equal_the_cache(shape: Shape) -> None:
    """Spans that begin and end anywhere, in any order, beside heads of another part."""
    batch = filled_batch(shape, [150, 5, 90], DEVICE, ring_starts=[140, 0, 0])
    assert_copies_equal_the_cache(batch, [(2, 13, 90), (0, 0, 150), (1, 0, 5), (0, 70, 71)], copy_prefixes, 2)


@runs
def test_more_spans_than_lanes() -> None:
    """Some of them empty: requests without a prefix."""
    batch = filled_batch(replace(SHAPES[0], kv_heads=1), [40] * 70, DEVICE)
    assert_copies_equal_the_cache(batch, [(request, 0, request % 3 * 7) for request in range(70)], copy_prefixes)


@runs
def test_rows_of_nothing_stay_as_they_were() -> None:
    """A span that reaches behind its request, and rows behind all spans."""
    shape = SHAPES[0]
    batch = filled_batch(shape, [40], DEVICE)
    space = torch.full((2, 90, shape.kv_heads, shape.head_dim), 7.0, dtype=shape.dtype, device=DEVICE)
    one = Spans(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0], [30], [0, 20])))
    copy_prefixes(batch.cache, batch.tables, one, *space)
    assert (space[:, 10:] == 7).all()
    assert (space[:, :10] != 7).any(-1).all()


@runs
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_values_are_numbers_and_keys_are_told(shape: Shape) -> None:
    """A tile of the attention kernel may reach from one request's rows into the next one's, where weights are 0."""
    batch = filled_batch(shape, [100], DEVICE)
    batch.cache.v_ring[int(batch.tables.ring_row[0])] = float("inf")
    for side in ("k_rows", "v_rows"):
        poison(batch, side, request=0, position=60)
    one = Spans(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0], [0], [0, 100])))
    k, v = (torch.empty(100, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=DEVICE) for _ in "kv")
    copy_prefixes(batch.cache, batch.tables, one, k, v)
    assert v.isfinite().all()
    assert k[60].isnan().any()
    assert k[61:].isfinite().all()


@runs
def test_what_it_does_not_read_is_left_to_triton() -> None:
    """Layers of one server: the CUDA kernel's and, refused by it by name, of 16 bits and of a codebook."""
    copies, shapes = PrefixCopies(), [SHAPES[0], OF_16_BITS[0], OF_OTHER_CODINGS[0]]
    caches = [filled_batch(shape, [40], DEVICE).cache for shape in shapes]
    kinds = copies.arrange([*caches, caches[0]], SHAPES[0].page_size, BF16)
    assert kinds == [variant_of(caches[0], SHAPES[0].page_size, BF16)]
    for shape, reason in zip(shapes[1:], ("16 bits", "codebooks"), strict=True):
        batch = filled_batch(shape, [40], DEVICE)
        with pytest.raises(ValueError, match=f"does not support .*{reason}"):
            assert_copies_equal_the_cache(batch, [(0, 0, 40)], copy_prefixes)
        assert_copies_equal_the_cache(batch, [(0, 0, 40)], copies)


@pytest.mark.parametrize("bits", [(3, 2), pytest.param((4, 4), marks=pytest.mark.slow)], ids=str)
def test_it_compiles_and_spills_nothing(bits: tuple[int, int]) -> None:
    shape = Shape(8, head_dim=128, group=128, windows=WINDOWS, page_size=64, k_bits=bits[0], v_bits=bits[1])
    variant = variant_of(filled_batch(shape, [40], torch.device("cpu")).cache, 64, BF16)
    assert rows_of_warp(variant) == 4
    assert spilled_bytes("prefix.cu", dict(defines(variant))) == 0
