"""The Hopper store kernel against the reference: windows, codes, scales, the rotated queries, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

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

from oscar_kernels import reference
from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.codec import STRETCH
from oscar_kernels.cuda.jit import compile_source
from oscar_kernels.cuda.store import arrange, defines, store
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.format import LayerFormat
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from support.hopper import HOPPER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = Windows(64, 256, 256)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

SHAPES = [
    Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64),
    Shape(kv_heads=8, head_dim=128, group=32, gqa=5, dtype=FP16, scale_dtype=FP16, windows=WINDOWS, page_size=64),
    Shape(kv_heads=3, head_dim=128, group=64, gqa=1, scale_dtype=FP32, windows=WINDOWS, page_size=64),
    Shape(kv_heads=2, head_dim=64, group=64, windows=WINDOWS, page_size=64),
    Shape(kv_heads=1, head_dim=64, group=32, gqa=8, dtype=FP16, windows=WINDOWS, page_size=64),
    Shape(kv_heads=4, head_dim=256, group=256, windows=WINDOWS, page_size=64),
    Shape(kv_heads=1, head_dim=256, group=32, gqa=2, scale_dtype=FP32, windows=WINDOWS, page_size=64),
    Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(0, 0, 0), page_size=64),
    Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(16, 0, 0), page_size=64),
    Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64, k_bits=3),
    Shape(kv_heads=2, head_dim=64, group=32, windows=WINDOWS, page_size=64, k_bits=4, v_bits=3, scale_dtype=FP16),
    Shape(kv_heads=1, head_dim=256, group=64, windows=WINDOWS, page_size=64, k_bits=3, v_bits=4, dtype=FP16),
]


def on_cpu(slots: StoreSlots) -> StoreSlots:
    return StoreSlots(slots.row.cpu(), slots.ring.cpu(), slots.sink.cpu())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rotated", ["keys and values", "keys", "centered", "nothing", "per head"])
@pytest.mark.parametrize("clip", [0.96, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_matches_reference(shape: Shape, clip: float, rotated: str) -> None:
    device, tokens = torch.device("cuda"), 37
    pages, requests = 3, 5
    slots = random_slots(tokens, shape.windows, pages * shape.page_size, requests, device)
    heads = shape.q_heads + 2 * shape.kv_heads
    fused = random_vectors((tokens, heads, shape.head_dim), shape.dtype, 1, device)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    rk = None if rotated == "nothing" else random_rotation(shape.head_dim, 2, device)
    rv = random_rotation(shape.head_dim, 3, device) if rotated == "keys and values" else None
    rq = random_rotation(shape.head_dim, 4, device) if rotated == "centered" else rk
    if rotated == "per head":
        rk, rq = (x.to(device) for x in random_transform(shape.head_dim, 2, shape.kv_heads))
        rv = random_transform(shape.head_dim, 3, shape.kv_heads)[0].to(device)
    center = None
    if rotated in ("centered", "per head"):
        center = torch.randn(shape.kv_heads, shape.head_dim, device=device)
    # The reference on a CPU: PyTorch divides by a constant inexactly on a GPU.
    caches = [empty_cache(shape, pages, requests, where, fill=7.0) for where in (device, torch.device("cpu"))]
    dual = None if rq is rk else rq
    layer = shape.format(SideTransform(rk, dual, center, clip), SideTransform(rv, clip=clip))
    q_rot = store(caches[0], slots, k, v, arrange(prepare(layer, shape.dtype)), q, shape.page_size)
    reference.store(caches[1], on_cpu(slots), k.cpu(), v.cpu(), layer.to("cpu"))
    for x, rotation, offset, name in ((k, rk, center, "k"), (v, rv, None, "v")):
        rows, wanted = (getattr(cache, f"{name}_rows").to(device) for cache in caches)
        plain = exact(x, rotation)
        y = plain if offset is None else plain - offset.double()
        length = torch.maximum(plain.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True))
        assert_correctly_rounded(rows[slots.row], y, shape.layout_of(name), clip, length)
        if rotation is None:
            assert torch.equal(rows, wanted)
        assert_next_to_reference(*caches, name, shape.layout_of(name), slots)
    assert_narrowed(q_rot, exact(q, rq), shape.dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("clip", [0.88, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fitted_rows_match_reference(shape: Shape, clip: float) -> None:
    """Codes are those of plain rows; scales and zero points are fitted to them, to each side's own gain."""
    device, tokens = torch.device("cuda"), 37
    slots = random_slots(tokens, shape.windows, 3 * shape.page_size, 5, device)
    heads = shape.q_heads + 2 * shape.kv_heads
    fused = random_vectors((tokens, heads, shape.head_dim), shape.dtype, 1, device)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    rotation = random_rotation(shape.head_dim, 2, device)
    caches = [empty_cache(shape, 3, 5, device) for _ in range(2)]
    for cache, gains in zip(caches, ((0.98, 1.0), (0.0, 0.0)), strict=True):
        layer = shape.format(SideTransform(rotation, clip=clip, gain=gains[0]), SideTransform(clip=clip, gain=gains[1]))
        store(cache, slots, k, v, arrange(prepare(layer, shape.dtype)), q, shape.page_size)
    for x, matrix, name, gain in ((k, rotation, "k", 0.98), (v, None, "v", 1.0)):
        rows, plain = (getattr(cache, f"{name}_rows")[slots.row] for cache in caches)
        assert_fitted(rows, plain, exact(x, matrix), shape.layout_of(name), gain)
        for window in ("ring", "sink"):
            assert torch.equal(*(getattr(cache, f"{name}_{window}") for cache in caches))


@pytest.mark.gpu
@needs_hopper
def test_fitted_rows_are_bit_exact_where_sums_are() -> None:
    """Small multiples of a power of two: no sum rounds, so neither does the order of summation count."""
    shape = Shape(kv_heads=8, head_dim=128, group=32, windows=Windows(0, 0, 0), page_size=64)
    device = torch.device("cuda")
    k = torch.randint(-40, 41, (16, 8, 128), generator=torch.Generator().manual_seed(0)).to(BF16)
    k[0], k[1], k[2] = 0, 7, 1
    k[2, :, ::32] = 1000
    k = (k / 4).to(device)
    q = torch.zeros(16, 32, 128, dtype=BF16, device=device)
    slots = random_slots(16, shape.windows, 64, 1, device)
    caches = [empty_cache(shape, 1, 1, where) for where in (device, torch.device("cpu"))]
    layer = shape.format(SideTransform(clip=0.88, gain=1.0), SideTransform(clip=0.96, gain=0.5))
    store(caches[0], slots, k, -k, arrange(prepare(layer, BF16)), q, 64)
    reference.store(caches[1], on_cpu(slots), k.cpu(), -k.cpu(), layer)
    for name in ("k_rows", "v_rows"):
        got, want = getattr(caches[0], name)[slots.row].cpu(), getattr(caches[1], name)[slots.row.cpu()]
        for mine, theirs in zip(
            split_rows(got, shape.layout_of(name)), split_rows(want, shape.layout_of(name)), strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_hopper
def test_ties_at_the_clip_threshold() -> None:
    """Equal magnitudes count one by one, whether few or all are equal."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(0, 0, 0), page_size=64)
    device = torch.device("cuda")
    k = torch.randint(-3, 4, (16, 8, 128), device=device).to(BF16)
    k[0] = 1.0
    k[1] = 0.0
    k[2, :, :5] = 9.0
    q = torch.zeros(16, 32, 128, dtype=BF16, device=device)
    slots = random_slots(16, shape.windows, 64, 1, device)
    caches = [empty_cache(shape, 1, 1, where) for where in (device, torch.device("cpu"))]
    for clip in (0.96, 0.92, 0.5):
        layer = shape.format(SideTransform(clip=clip), SideTransform(clip=clip))
        store(caches[0], slots, k, -k, arrange(prepare(layer, BF16)), q, 64)
        reference.store(caches[1], on_cpu(slots), k.cpu(), -k.cpu(), layer)
        for name in ("k_rows", "v_rows"):
            got, want = getattr(caches[0], name)[slots.row].cpu(), getattr(caches[1], name)[slots.row.cpu()]
            # Numbers, not bits: a zero point of 0 may have either sign.
            for mine, theirs in zip(
                split_rows(got, shape.layout_of(name)), split_rows(want, shape.layout_of(name)), strict=True
            ):
                assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("gain", [0.0, 0.98])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:7], ids=str)
def test_a_nan_is_kept_in_its_vector(shape: Shape, rotated: bool, gain: float) -> None:
    """One channel of one head: all of that head of that token is read back as NaN, nothing else changes."""
    device, tokens, d = torch.device("cuda"), 20, shape.head_dim
    matrix = random_rotation(d, 1, device) if rotated else None
    sides = (SideTransform(matrix, clip=clip, gain=gain) for clip in (0.96, 0.92))
    layer = arrange(prepare(shape.format(*sides), shape.dtype))
    slots = StoreSlots(torch.arange(tokens, device=device), *(torch.full((tokens,), -1, device=device),) * 2)
    k = random_vectors((tokens, shape.kv_heads, d), shape.dtype, 1, device)
    q = random_vectors((tokens, shape.q_heads, d), shape.dtype, 2, device)
    broken = k.clone()
    broken[4, -1, 7] = float("nan")
    caches = [empty_cache(shape, 3, 2, device) for _ in range(2)]
    for cache, x in zip(caches, (k, broken), strict=True):
        store(cache, slots, x, x, layer, q, shape.page_size)
    for name in ("k_rows", "v_rows"):
        plain, mine = (split_rows(getattr(cache, name)[:tokens], shape.layout_of(name)) for cache in caches)
        for part, want in zip(mine, plain, strict=True):
            want[4, -1] = 0.0 if part is mine[0] else float("nan")
            torch.testing.assert_close(part, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("largest", [20.0, 100.0])
def test_matrices_with_large_entries(largest: float) -> None:
    shape = SHAPES[1]
    device = torch.device("cuda")
    k = random_vectors((5, shape.kv_heads, 128), FP16, 1, device)
    q = random_vectors((5, shape.q_heads, 128), FP16, 2, device)
    matrix = random_rotation(128, 3, device)
    matrix[3, 5] = largest
    layer = arrange(prepare(shape.format(SideTransform(matrix, matrix)), FP16))
    slots = random_slots(5, shape.windows, 64, 2, device)
    got = store(empty_cache(shape, 1, 2, device), slots, k, k, layer, q, shape.page_size)
    want = exact(q, matrix)
    assert ((got.double() - want).abs() <= 2.0**-11 * want.abs() + 1e-5 * want.norm(dim=-1, keepdim=True)).all()


@pytest.mark.gpu
@needs_hopper
def test_vectors_at_odd_addresses_are_refused() -> None:
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(0, 0, 0), page_size=64)
    device = torch.device("cuda")
    k = torch.zeros(2, 8, 132, dtype=BF16, device=device)[:, :, :128]
    q = torch.zeros(2, 32, 128, dtype=BF16, device=device)
    slots = random_slots(2, shape.windows, 64, 1, device)
    with pytest.raises(ValueError, match="k must have heads at multiples of 16 bytes"):
        store(empty_cache(shape, 1, 1, device), slots, k, k, prepare(shape.format(), BF16), q, 64)


def test_bounds_of_fitted_scales_are_those_of_the_codec() -> None:
    variant = Variant(SHAPES[0].key_layout, SHAPES[0].value_layout, WINDOWS, 4, 64, BF16, BF16)
    macros = dict(defines(variant, prepare(SHAPES[0].format(), BF16)))
    assert macros["OSCAR_STRETCH_64THS"] / 64 == STRETCH


@pytest.mark.parametrize("sets", [None, 2])
def test_a_lane_finds_its_columns(sets: int | None) -> None:
    """The order of ``arrange``, element by element as the kernel's comment has it."""
    shape = Shape(kv_heads=2)
    prepared = prepare(shape.format(SideTransform(*random_transform(64, 1, sets))), BF16)
    arranged = arrange(prepared)
    for plain, ordered in (
        (prepared.key.matrix, arranged.key.matrix),
        (prepared.key.reading, arranged.key.reading),
    ):
        assert plain is not None
        assert ordered is not None
        assert ordered.arranged
        flat = ordered.terms.flatten()
        index = 0
        for head, term in itertools.product(range(sets or 1), range(3)):
            for warp, unit, e, lane in itertools.product(range(4), range(2), range(2), range(32)):
                n, c = divmod(lane, 4)
                for tile, i in itertools.product(range(2), range(4)):
                    channel = 32 * unit + 8 * c + 4 * e + i
                    assert flat[index] == plain.terms[head, term, channel, 16 * warp + 8 * tile + n]
                    index += 1


def test_one_matrix_is_arranged_once() -> None:
    """Keys and queries of an orthogonal matrix share its terms; of outputs they lie as the decode kernel reads them."""
    rotated = SideTransform(random_rotation(64, 1, torch.device("cpu")))
    prepared = prepare(Shape().format(rotated, rotated), BF16)
    arranged = arrange(prepared)
    assert prepared.key.reading is prepared.key.matrix
    assert arranged.key.reading is arranged.key.matrix
    assert arranged.value.matrix is not None
    assert arranged.value.reading is not None
    assert prepared.value.reading is not None
    assert torch.equal(arranged.value.reading.terms, prepared.value.reading.terms[:, :2].mT)


def case_of(shape: Shape, kind: str) -> LayerFormat:
    """What ``kind`` names: transforms of keys, of both, of neither; with centers and gains where of both."""
    sets = shape.kv_heads if "per head" in kind else None
    key = SideTransform(*random_transform(shape.head_dim, 1, sets)) if kind != "nothing" else SideTransform()
    if "both" not in kind:
        return shape.format(key)
    center = torch.zeros(shape.kv_heads, shape.head_dim)
    value = SideTransform(*random_transform(shape.head_dim, 2, sets), gain=1.0)
    return shape.format(replace(key, center=center, gain=0.98), value)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (SHAPES[0], "keys"),
        (SHAPES[4], "nothing"),
        (SHAPES[9], "both"),
        (SHAPES[0], "keys per head"),
        (SHAPES[4], "both per head"),
        (SHAPES[0], "both"),
    ],
    ids=str,
)
def test_variants_compile(shape: Shape, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variant = Variant(
        shape.key_layout, shape.value_layout, shape.windows, shape.gqa, shape.page_size, shape.dtype, shape.dtype
    )
    layer = prepare(case_of(shape, kind), shape.dtype)
    assert compile_source("store.cu", dict(defines(variant, layer)))[:4] == b"\x7fELF"
