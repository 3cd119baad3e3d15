"""The store kernel against the reference: windows, codes, scales and the rotated queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    OF_16_BITS,
    OF_OTHER_CODINGS,
    Shape,
    empty_cache,
    random_rotation,
    random_slots,
    random_vectors,
)
from store_cases import (
    MANTISSA,
    ROUNDING,
    SHAPES,
    assert_correctly_rounded,
    assert_fitted,
    assert_next_to_reference,
    exact,
    run_both,
    split_rows,
)

from oscar_kernels import reference
from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.codec import STRETCH
from oscar_kernels.cuda.store import arrange
from oscar_kernels.format import LayerFormat
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.store import store


@pytest.mark.parametrize(
    ("shape", "clip"),
    [
        *((shape, 0.96) for shape in (*SHAPES, *OF_OTHER_CODINGS[:4])),
        (SHAPES[0], 0.7),
        (SHAPES[2], 0.7),
        (SHAPES[1], 1.0),
    ],
    ids=str,
)
def test_store_matches_reference(shape: Shape, clip: float, device: torch.device) -> None:
    tokens = 37
    caches, slots, (q, k, v), (rk, rv), q_rot = run_both(shape, tokens, clip, device, rotate_v=clip != 1.0)
    for x, rotation, name in ((k, rk, "k"), (v, rv, "v")):
        rows = getattr(caches[0], f"{name}_rows")
        book = caches[0].k_codebook if name == "k" else None
        assert_correctly_rounded(rows[slots.row], exact(x, rotation), shape.layout_of(name), clip, book=book)
        assert_next_to_reference(*caches, name, shape.layout_of(name), slots)
    wide = exact(q, rk)
    assert q_rot.dtype == q.dtype
    torch.testing.assert_close(q_rot.double(), wide, rtol=2.0 ** -MANTISSA[q.dtype] * 1.01, atol=1e-4)
    torch.testing.assert_close(rotate(q, split_matrix(rk, q.dtype)), q_rot, rtol=0, atol=0)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shape", OF_16_BITS, ids=str)
def test_a_side_of_16_bits(shape: Shape, rotated: bool, device: torch.device) -> None:
    """Without a matrix its rows are the vectors bit for bit, what is not finite included; with one, their rounding.

    The other side's rows are those that it has beside codes, and slots that nothing was stored in stay as they were.
    """
    tokens, dtype, requests = 37, shape.dtype, 5
    pages = -(-tokens // shape.page_size) + 2
    slots = random_slots(tokens, shape.windows, pages * shape.page_size, requests, device)
    k, v = (random_vectors((tokens, shape.kv_heads, shape.head_dim), dtype, seed, device) for seed in (1, 2))
    for x, layout in ((k, shape.key_layout), (v, shape.value_layout)):
        if layout.exact:
            x[3, 0, 5], x[4, 0, 6], x[5, 0, :] = -0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max
            if not rotated:
                x[6, 0, 1], x[7, 0, 2] = float("inf"), float("nan")
    k_matrix, v_matrix = (random_rotation(shape.head_dim, seed, device) if rotated else None for seed in (3, 4))
    coded = replace(shape, k_bits=min(shape.k_bits, 4), v_bits=min(shape.v_bits, 4))
    caches = []
    for of in (shape, coded):
        caches.append(empty_cache(of, pages, requests, device, fill=7.0))
        layer = of.format(SideTransform(k_matrix, clip=0.96, gain=0.98), SideTransform(v_matrix, clip=0.92, gain=1.0))
        store(caches[-1], slots, k, v, prepare(layer, dtype))
    written = torch.zeros(pages * shape.page_size, dtype=torch.bool, device=device)
    written[slots.row] = True
    for name, x, matrix in (("k", k, k_matrix), ("v", v, v_matrix)):
        rows, beside = (getattr(cache, f"{name}_rows") for cache in caches)
        layout = shape.layout_of(name)
        assert (rows[~written] == 0).all()
        if not layout.exact:
            assert torch.equal(rows, beside)
            continue
        got = rows[slots.row].view(dtype).view_as(x)
        for window, index in (("ring", slots.ring), ("sink", slots.sink)):
            buffer, kept = getattr(caches[0], f"{name}_{window}"), index >= 0
            if buffer.numel():
                torch.testing.assert_close(buffer.flatten(0, 1)[index[kept]], got[kept], rtol=0, atol=0, equal_nan=True)
        if matrix is None:
            assert torch.equal(got.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])
            assert torch.equal(got.isnan(), x.isnan())
        else:
            finite = torch.arange(tokens, device=device) != 5
            want = exact(x, matrix)[finite]
            bound = 2.0 ** -MANTISSA[dtype] * want.abs() + ROUNDING * want.norm(dim=-1, keepdim=True)
            assert ((got[finite].double() - want).abs() <= bound * 1.001).all()


@pytest.mark.parametrize(
    ("shape", "clip"),
    [
        *((shape, 0.96) for shape in (*SHAPES[:5], SHAPES[8], SHAPES[9], *OF_OTHER_CODINGS[1:4])),
        *((SHAPES[number], clip) for number, clip in ((0, 0.88), (0, 1.0), (3, 0.88), (8, 1.0))),
    ],
    ids=str,
)
def test_fitted_rows_match_reference(shape: Shape, clip: float, device: torch.device) -> None:
    """Codes are those of plain rows; scales and zero points are refitted to them."""
    caches, slots, (_, k, v), (rk, rv), _ = run_both(shape, 37, clip, device, rotate_v=True, gain=0.98)
    plain, *_ = run_both(shape, 37, clip, device, rotate_v=True)
    for x, rotation, name in ((k, rk, "k"), (v, rv, "v")):
        rows, wanted, without = (getattr(cache, f"{name}_rows")[slots.row] for cache in (*caches, plain[0]))
        book = caches[0].k_codebook if name == "k" else None
        assert_fitted(rows, without, exact(x, rotation), shape.layout_of(name), 0.98, book)
        (codes, *got), (wanted_codes, *want) = (
            split_rows(rows, shape.layout_of(name)),
            split_rows(wanted, shape.layout_of(name)),
        )
        # A code on a boundary may be another one after a rotation in other order, and the rest follows from the codes;
        # a zero point is that of the scale as stored.
        same = (codes == wanted_codes).all(-1)
        assert same.double().mean() > 0.95
        for mine, theirs in zip(got, want, strict=True):
            tolerance = 2.0 ** (1 - MANTISSA[shape.scale_dtype]) + 1e-4
            torch.testing.assert_close(mine[same], theirs[same], rtol=tolerance, atol=1e-4)
            if shape.scale_dtype != torch.float32:
                assert (mine != theirs)[same].double().mean() < 2e-2
                same &= mine == theirs


def test_fitted_rows_are_bit_exact_where_sums_are(device: torch.device) -> None:
    """Small multiples of a power of two: no sum rounds, so neither does the order of summation count."""
    shape = Shape(head_dim=128, group=32)
    slots = StoreSlots(*(torch.arange(16, device=device),) * 3)
    k = torch.randint(-40, 41, (16, shape.kv_heads, 128), generator=torch.Generator().manual_seed(0)).to(shape.dtype)
    k[0], k[1], k[2, :, :] = 0, 7, 1
    k[2, :, ::32] = 1000  # bounded: see STRETCH
    # PyTorch divides by a constant exactly on the CPU only.
    on_cpu = StoreSlots(*(torch.arange(16),) * 3)
    k = k / 4
    caches = [empty_cache(shape, 2, 2, device), empty_cache(shape, 2, 2, torch.device("cpu"))]
    layer = shape.format(SideTransform(clip=0.88, gain=1.0), SideTransform(clip=0.96, gain=0.5))
    reference.store(caches[1], on_cpu, k, -k, layer)
    k = k.to(device)
    store(caches[0], slots, k, -k, prepare(layer, k.dtype))
    plain = empty_cache(shape, 2, 2, device)
    store(plain, slots, k, -k, prepare(shape.format(SideTransform(clip=0.88), SideTransform(clip=0.96)), k.dtype))
    for name in ("k_rows", "v_rows"):
        got, want, before = (
            split_rows(getattr(cache, name)[:16].cpu(), shape.layout_of(name)) for cache in (*caches, plain)
        )
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine, theirs)
        assert (got[1] <= before[1] * STRETCH * 1.01).all()
        assert torch.equal(got[1][0], before[1][0])


@pytest.mark.parametrize("clip", [0.96, 0.7, 0.01])
def test_identity_is_bit_exact_with_duplicates(clip: float, device: torch.device) -> None:
    """Without rotation nothing rounds before the codec; few distinct magnitudes make every rank a tie."""
    shape = Shape(head_dim=128, group=32)
    slots = StoreSlots(*(torch.arange(8, device=device),) * 3)
    k = torch.randint(-3, 4, (8, shape.kv_heads, 128), generator=torch.Generator().manual_seed(0))
    k = (k.to(shape.dtype) / 4).to(device)
    k[0] = 0
    v = random_vectors((8, shape.kv_heads, 128), shape.dtype, 5, device)
    caches = [empty_cache(shape, 2, 2, device) for _ in range(2)]
    layer = shape.format(SideTransform(clip=clip), SideTransform(clip=clip))
    assert store(caches[0], slots, k, v, prepare(layer, shape.dtype)) is None
    reference.store(caches[1], slots, k, v, layer)
    for name in ("k_ring", "v_ring", "k_sink", "v_sink"):
        assert torch.equal(getattr(caches[0], name), getattr(caches[1], name))
    for name, x in (("k_rows", k), ("v_rows", v)):
        assert_correctly_rounded(getattr(caches[0], name)[:8], x.double(), shape.layout_of(name), clip)
        # Numbers, not bytes: a zero point of 0 may have either sign.
        codes, scale, zero = split_rows(getattr(caches[0], name)[:8], shape.layout_of(name))
        want_codes, want_scale, want_zero = split_rows(getattr(caches[1], name)[:8], shape.layout_of(name))
        assert (codes != want_codes).double().mean() < 1e-3
        assert torch.equal(scale, want_scale)
        assert torch.equal(zero, want_zero)


def test_nan_stays_in_its_token(device: torch.device) -> None:
    """A padded row of garbage harms no other row of its tile."""
    shape = Shape()
    rotated = SideTransform(random_rotation(64, 1, device), clip=0.96)
    layer = prepare(shape.format(rotated, rotated), shape.dtype)
    results = []
    for poison in (False, True):
        cache = empty_cache(shape, 3, 2, device)
        k = random_vectors((20, shape.kv_heads, 64), shape.dtype, 1, device)
        if poison:
            k[4] = float("nan")
        slots = StoreSlots(torch.arange(20, device=device), *(torch.full((20,), -1, device=device),) * 2)
        q_rot = store(cache, slots, k, k, layer, q=k)
        results.append((cache, q_rot))
    keep = torch.arange(20, device=device) != 4
    assert torch.equal(results[0][0].k_rows[:20][keep], results[1][0].k_rows[:20][keep])
    assert torch.equal(results[0][0].v_rows[:20][keep], results[1][0].v_rows[:20][keep])
    assert torch.equal(results[0][1][keep], results[1][1][keep])


@pytest.mark.parametrize(
    ("shape", "rotated", "gain"),
    [
        *((SHAPES[0], rotated, gain) for rotated in (True, False) for gain in (0.0, 0.98)),
        *((shape, True, 0.98) for shape in (SHAPES[2], OF_OTHER_CODINGS[0])),
        *((shape, False, 0.0) for shape in (SHAPES[3], OF_OTHER_CODINGS[0])),
    ],
    ids=str,
)
def test_a_nan_is_kept_in_its_vector(shape: Shape, rotated: bool, gain: float, device: torch.device) -> None:
    """One channel of one head: all of that head of that token is read back as NaN, nothing else changes."""
    tokens, d = 20, shape.head_dim
    rotation = random_rotation(d, 1, device) if rotated else None
    layer = shape.format(*(SideTransform(rotation, clip=clip, gain=gain) for clip in (0.96, 0.92))).to(device)
    slots = StoreSlots(torch.arange(tokens, device=device), *(torch.full((tokens,), -1, device=device),) * 2)
    k = random_vectors((tokens, shape.kv_heads, d), shape.dtype, 1, device)
    broken = k.clone()
    broken[4, shape.kv_heads - 1, 7] = float("nan")
    caches = [empty_cache(shape, 3, 2, device) for _ in range(3)]
    for cache, x in zip(caches, (k, broken, broken), strict=True):
        if cache is caches[2]:
            reference.store(cache, slots, x, x, layer)
        else:
            store(cache, slots, x, x, prepare(layer, shape.dtype))
    for name in ("k_rows", "v_rows"):
        plain, mine, theirs = (split_rows(getattr(cache, name)[:tokens], shape.layout_of(name)) for cache in caches)
        for part, want in zip(mine, plain, strict=True):
            changed = want.clone()
            changed[4, -1] = 0.0 if part is mine[0] else float("nan")
            torch.testing.assert_close(part, changed, rtol=0, atol=0, equal_nan=True)
        for part, want in zip(mine, theirs, strict=True):
            assert torch.equal(part.isnan(), want.isnan())
        assert (theirs[0][4, -1] == 0).all()


def test_rejects_what_it_cannot_store(device: torch.device) -> None:
    shape = Shape()
    cache, slots = empty_cache(shape, 3, 2, device), random_slots(4, shape.windows, 48, 2, device)
    k = random_vectors((4, shape.kv_heads, 64), torch.bfloat16, 1, device)
    layer = prepare(shape.format(), torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16 or all float16"):
        store(cache, slots, k, k.half(), layer)
    with pytest.raises(ValueError, match="contiguous channels"):
        store(cache, slots, k.transpose(1, 2).contiguous().transpose(1, 2), k, layer)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        prepare(shape.format(SideTransform(torch.eye(64))), torch.float32)
    turned = shape.format(SideTransform(random_rotation(64, 1, device)))
    with pytest.raises(ValueError, match=r"float16 does not fit 2 heads of torch.bfloat16"):
        store(cache, slots, k, k, prepare(turned, torch.float16))
    with pytest.raises(ValueError, match=r"cuda\.store\.arrange"):
        store(cache, slots, k, k, arrange(prepare(turned, torch.bfloat16)))
    other = replace(shape, group=32)
    with pytest.raises(ValueError, match="the format has key rows of"):
        store(cache, slots, k, k, prepare(other.format(), torch.bfloat16))
    with pytest.raises(ValueError, match="the format has key rows of"):
        reference.store(cache, slots, k, k, other.format())
    wide = LayerFormat(2, 64, shape.format().key, replace(shape, scale_dtype=torch.float32).format().value)
    with pytest.raises(ValueError, match="scales of one dtype"):
        store(replace(cache, v_layout=wide.value_layout), slots, k, k, prepare(wide, torch.bfloat16))
    exact = [replace(shape, k_bits=16, v_bits=16, dtype=dtype).format() for dtype in (torch.bfloat16, torch.float16)]
    mixed = LayerFormat(2, 64, exact[0].key, exact[1].value)
    cache = replace(cache, k_layout=mixed.key_layout, v_layout=mixed.value_layout)
    with pytest.raises(ValueError, match="16 bits of one dtype"):
        store(cache, slots, k, k, prepare(mixed, torch.bfloat16))


def test_no_tokens(device: torch.device) -> None:
    shape = Shape()
    cache, slots = empty_cache(shape, 3, 2, device), random_slots(0, shape.windows, 48, 2, device)
    k = torch.empty(0, shape.kv_heads, 64, dtype=shape.dtype, device=device)
    store(cache, slots, k, k, prepare(shape.format(), shape.dtype), q=k)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store_at_size(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    shape = replace(SHAPES[1], kv_heads=8, gqa=4, dtype=dtype, windows=Windows(64, 256, 256), page_size=64)
    caches, slots, (_, k, v), (rk, rv), _ = run_both(shape, tokens, 0.96, device, rotate_v=True)
    assert_correctly_rounded(caches[0].k_rows[slots.row], exact(k, rk), shape.key_layout, 0.96)
    assert_correctly_rounded(caches[0].v_rows[slots.row], exact(v, rv), shape.value_layout, 0.96)
    assert (caches[0].k_rows != caches[1].k_rows).double().mean() < 1e-3
