"""The CUDA kernels with rows without zero points and with codebooks: on a Hopper GPU, or on a CPU thread by thread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    Shape,
    assert_as_good_as,
    assert_lse,
    decode_exact,
    empty_cache,
    filled_batch,
    multiplied,
    poison,
    random_rotation,
    random_slots,
    random_transform,
    random_trees,
    random_vectors,
    verify_exact,
    with_new_tokens,
)
from store_cases import exact

from oscar_kernels import reference
from oscar_kernels.cache import Windows
from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import decode_rows
from oscar_kernels.cuda.decode import arrange_reading, decode, verify
from oscar_kernels.cuda.store import arrange, store
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.transform import SideTransform
from oscar_kernels.visible import words_of
from support.hopper import DEVICE, MARKS, running

pytestmark = MARKS
WINDOWS = Windows(16, 24, 32)
FP16, FP32 = torch.float16, torch.float32
BOTH = Shape(
    kv_heads=2, gqa=4, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3, k_coding=SYMMETRIC,
    v_coding=SYMMETRIC,
)  # fmt: skip
SHAPES = [
    BOTH,
    # Rows that are no whole words, and those of eight heads, whose tokens lie in order.
    replace(BOTH, kv_heads=1, gqa=5, k_bits=4, v_bits=3),
    replace(BOTH, kv_heads=3, gqa=2, head_dim=64, group=32, k_bits=2, v_bits=4, dtype=FP16, scale_dtype=FP16),
    replace(BOTH, kv_heads=8, gqa=1, k_bits=2),
]
BOOK = replace(BOTH, k_bits=2, k_coding=CODEBOOK)
BOOKS = [
    BOOK,
    replace(BOOK, kv_heads=1, gqa=16, group=64, v_coding=AFFINE, v_bits=3),
    replace(BOOK, kv_heads=3, gqa=1, head_dim=64, group=64, v_bits=4, dtype=FP16, scale_dtype=FP16),
    replace(BOOK, kv_heads=1, gqa=12, head_dim=256, scale_dtype=FP32),
    # Of one book that all share, eight heads have room.
    replace(BOOK, kv_heads=8, gqa=2, shared_book=True),
    replace(BOOK, kv_heads=3, gqa=5, head_dim=64, group=64, dtype=FP16, scale_dtype=FP16, shared_book=True),
]


@pytest.mark.parametrize("shape", SHAPES + BOOKS, ids=str)
def test_decode(shape: Shape) -> None:
    """Requests from nothing to several blocks' worth; rows that must not be read are NaN."""
    lengths = [1, 39, 0, 200]
    batch = filled_batch(shape, lengths, DEVICE)
    q = random_vectors((len(lengths), shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    sm_scale = 0.4 * shape.head_dim**-0.5
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    with running():
        out = decode(batch.cache, batch.tables, q, sm_scale, lse=lse)
    assert_lse(lse, batch, q, sm_scale)
    wide = decode_exact(batch, q, sm_scale, torch.float64)
    assert_as_good_as(out, wide, decode_exact(batch, q, sm_scale, shape.dtype))


@pytest.mark.parametrize("side", ["k_rows", "v_rows"])
@pytest.mark.parametrize("shape", [SHAPES[1], BOOK], ids=str)
def test_a_nan_reaches_the_heads_that_read_it(shape: Shape, side: str) -> None:
    batch = filled_batch(shape, [170, 60], DEVICE)
    q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    with running():
        clean = decode(batch.cache, batch.tables, q, 0.05)
        poison(batch, side, request=0, position=100)
        out = decode(batch.cache, batch.tables, q, 0.05)
    assert out[0, -shape.gqa :].isnan().all()
    out[0, -shape.gqa :] = clean[0, -shape.gqa :]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("shape", [BOTH, BOOK], ids=str)
def test_verify_with_outputs_multiplied(shape: Shape) -> None:
    lengths, tokens = [40, 1, 170], 5
    batch, seen = with_new_tokens(filled_batch(shape, lengths, DEVICE), tokens), random_trees(len(lengths), tokens)
    q = random_vectors((len(lengths) * tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads)[1].to(DEVICE)
    reading = arrange_reading(split_matrix(matrix, shape.dtype))
    with running():
        out = verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q, 0.04, reading=reading)
    wide, plain = (
        multiplied(verify_exact(batch, seen, q, 0.04, dtype), matrix) for dtype in (torch.float64, shape.dtype)
    )
    assert_as_good_as(out, wide, plain)


@pytest.mark.parametrize(
    ("shape", "gain"),
    [*((shape, 0.98) for shape in (*SHAPES[:3], *BOOKS[::2])), (BOOKS[3], 0.0), (BOOKS[5], 0.98)],
    ids=str,
)
def test_store(shape: Shape, gain: float) -> None:
    """What is read back is as near as what the reference stores; bytes are its own but where rounding decides."""
    tokens, heads = 21, shape.q_heads + 2 * shape.kv_heads
    slots = random_slots(tokens, shape.windows, 2 * shape.page_size, 5, DEVICE)
    fused = random_vectors((tokens, heads, shape.head_dim), shape.dtype, 1, DEVICE)
    fused[3, -2] = 0.0
    fused[4, shape.q_heads, 7] = float("nan")
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    rk = random_rotation(shape.head_dim, 2, DEVICE)
    layer = shape.format(SideTransform(rk, clip=0.96, gain=gain), SideTransform(clip=0.92, gain=gain)).to(DEVICE)
    caches = [empty_cache(shape, 2, 5, DEVICE, fill=7.0) for _ in range(2)]
    with running():
        store(caches[0], slots, k, v, arrange(prepare(layer, shape.dtype)), q, shape.page_size)
    reference.store(caches[1], slots, k, v, layer)
    for x, name in ((exact(k, rk), "k"), (exact(v, None), "v")):
        layout, book = shape.layout_of(name), caches[0].k_codebook if name == "k" else None
        rows, wanted = (getattr(cache, f"{name}_rows")[slots.row] for cache in caches)
        codes, wanted_codes = (of[:, : layout.params_offset] for of in (rows, wanted))
        assert (codes != wanted_codes).double().mean() < 5e-3
        read, best = (decode_rows(of, layout, book).double() for of in (rows, wanted))
        broken = x.isnan().any(-1)
        assert torch.equal(read.isnan().any(-1), broken)
        assert not rows[broken.any(-1), : layout.code_bytes].any()
        error, least = ((of - x).norm(dim=-1)[~broken] for of in (read, best))
        assert (error <= least * 1.01 + 1e-6).all()


@pytest.mark.parametrize("shape", BOOKS[4:], ids=str)
def test_of_equal_points_of_a_shared_book_the_first_is_stored(shape: Shape) -> None:
    """Every point is there twice; a vector of zeros is nearest to the shortest; some groups are far from all points."""
    generator = torch.Generator().manual_seed(6)
    points = torch.randn(128, 4, generator=generator)
    lengths = 0.5 + torch.rand(shape.kv_heads, shape.head_dim // 4, generator=generator)
    lengths[0, 3], lengths[-1, 5] = 1e-3, 1e-9
    book = Codebook.from_shared(torch.cat([points, points.flip(0)]), lengths).to(DEVICE)
    layer = shape.format().to(DEVICE)
    layer = replace(layer, key=replace(layer.key, codebook=book))
    tokens = 5
    slots = random_slots(tokens, shape.windows, 2 * shape.page_size, 5, DEVICE)
    q, k, v = (
        random_vectors((tokens, heads, shape.head_dim), shape.dtype, seed, DEVICE)
        for seed, heads in enumerate((shape.q_heads, shape.kv_heads, shape.kv_heads))
    )
    k[0], k[1, :, 9] = 0.0, 300.0
    caches = [replace(empty_cache(shape, 2, 5, DEVICE, fill=7.0), k_codebook=book) for _ in range(2)]
    with running():
        store(caches[0], slots, k, v, arrange(prepare(layer, shape.dtype)), q, shape.page_size)
    reference.store(caches[1], slots, k, v, layer)
    codes, wanted = (cache.k_rows[slots.row, : shape.key_layout.params_offset] for cache in caches)
    assert torch.equal(codes, wanted)
    assert codes.max() < 128
