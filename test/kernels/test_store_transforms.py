"""The store kernel with centers and with matrices of any size: of every kv head, and with large entries."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    Shape,
    empty_cache,
    random_rotation,
    random_slots,
    random_transform,
    random_vectors,
)
from store_cases import MANTISSA, SHAPES, assert_correctly_rounded, exact

from oscar_kernels import reference
from oscar_kernels.cache import StoreSlots
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.store import store


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[7]], ids=str)
def test_centered_keys_match_reference(shape: Shape, device: torch.device) -> None:
    """Keys less a center per kv head; queries by a matrix of their own; values untouched by either."""
    tokens, d = 37, shape.head_dim
    slots = random_slots(tokens, shape.windows, 96, 5, device)
    k, v = (random_vectors((tokens, shape.kv_heads, d), shape.dtype, seed, device) for seed in (1, 2))
    q = random_vectors((tokens, shape.q_heads, d), shape.dtype, 3, device)
    rotation, other = random_rotation(d, 4, device), random_rotation(d, 5, device)
    center = 3 * torch.randn(shape.kv_heads, d, generator=torch.Generator().manual_seed(6)).to(device)
    caches = [empty_cache(shape, 6, 5, device, fill=7.0) for _ in range(3)]
    layer = shape.format(SideTransform(rotation, other, center, 0.96), SideTransform(clip=0.92))
    plain = shape.format(SideTransform(rotation, clip=0.96), SideTransform(clip=0.92))
    q_rot = store(caches[0], slots, k, v, prepare(layer, shape.dtype), q=q)
    reference.store(caches[1], slots, k, v, layer)
    store(caches[2], slots, k, v, prepare(plain, shape.dtype))
    exact_keys = k.double() @ rotation.double() - center.double()
    # The rotation rounds relative to the key before its center is taken off.
    assert_correctly_rounded(
        caches[0].k_rows[slots.row], exact_keys, shape.key_layout, 0.96, k.double().norm(dim=-1, keepdim=True)
    )
    for window in ("ring", "sink"):
        got, want = (getattr(cache, f"k_{window}").float() for cache in caches[:2])
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-4)
        assert torch.equal(getattr(caches[0], f"v_{window}"), getattr(caches[2], f"v_{window}"))
    assert torch.equal(caches[0].v_rows, caches[2].v_rows)
    torch.testing.assert_close(q_rot, rotate(q, split_matrix(other, q.dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 37, 150])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], Shape(gqa=3, head_dim=128, group=64)], ids=str)
def test_every_head_by_its_own_matrix(shape: Shape, tokens: int, device: torch.device) -> None:
    """Keys, values, queries and outputs, each by the matrix of its kv head; other numbers as in float64."""
    d, heads = shape.head_dim, shape.kv_heads
    slots = random_slots(tokens, shape.windows, 160, 5, device)
    k, v = (random_vectors((tokens, heads, d), shape.dtype, seed, device) for seed in (1, 2))
    q = random_vectors((tokens, shape.q_heads, d), shape.dtype, 3, device)
    center = torch.randn(heads, d, generator=torch.Generator().manual_seed(6))
    key = SideTransform(*random_transform(d, 4, heads), center, 0.96)
    value = SideTransform(*random_transform(d, 5, heads), clip=0.92)
    layer = shape.format(key, value).to(device)
    caches = [empty_cache(shape, 160 // shape.page_size, 5, device, fill=7.0) for _ in range(2)]
    prepared = prepare(layer, shape.dtype)
    q_rot = store(caches[0], slots, k, v, prepared, q=q)
    reference.store(caches[1], slots, k, v, layer)
    for x, side, name in ((k, layer.key.transform, "k"), (v, layer.value.transform, "v")):
        y = exact(x, side.matrix)
        y = y if side.center is None else y - side.center.double()
        length = torch.maximum(2 * x.double().norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True))
        assert_correctly_rounded(
            getattr(caches[0], f"{name}_rows")[slots.row], y, shape.layout_of(name), side.clip, length
        )
        for window in ("ring", "sink"):
            got, want = (getattr(cache, f"{name}_{window}").float() for cache in caches)
            torch.testing.assert_close(got, want, rtol=2**-7, atol=4e-4)
    assert q_rot is not None
    for got, split, matrix in (
        (q_rot, prepared.key.reading, layer.key.transform.dual),
        (None, prepared.value.reading, layer.value.transform.back),
    ):
        alone = rotate(q, split)
        assert got is None or torch.equal(got, alone)
        tolerance = 2.0 ** (1 - MANTISSA[q.dtype])
        torch.testing.assert_close(alone.double(), exact(q, matrix), rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
def test_one_matrix_repeated_for_every_head_is_that_matrix(shape: Shape, device: torch.device) -> None:
    """Bit for bit on a GPU: order and number of tiles do not count."""
    tokens, matrix = 70, random_rotation(shape.head_dim, 4, device)
    slots = random_slots(tokens, shape.windows, 160, 5, device)
    k, v = (random_vectors((tokens, shape.kv_heads, shape.head_dim), shape.dtype, seed, device) for seed in (1, 2))
    q = random_vectors((tokens, shape.q_heads, shape.head_dim), shape.dtype, 3, device)
    caches = [empty_cache(shape, 160 // shape.page_size, 5, device, fill=7.0) for _ in range(2)]
    rotated = []
    for cache, given in zip(caches, (matrix, matrix.repeat(shape.kv_heads, 1, 1)), strict=True):
        side = SideTransform(given, clip=0.96, gain=0.98)
        rotated.append(store(cache, slots, k, v, prepare(shape.format(side, side), shape.dtype), q=q))
    if device.type == "cuda":
        assert torch.equal(*rotated)
        for name in ("k_rows", "v_rows", "k_ring", "v_ring", "k_sink", "v_sink"):
            assert torch.equal(*(getattr(cache, name) for cache in caches))
    else:
        # NumPy's sums depend on the place of a vector in its tile.
        torch.testing.assert_close(*rotated, rtol=2.0 ** (1 - MANTISSA[shape.dtype]), atol=1e-5)
        for name in ("k_rows", "v_rows"):
            assert torch.ne(*(getattr(cache, name) for cache in caches)).double().mean() < 2e-3


def test_center_of_zero_is_no_center(device: torch.device) -> None:
    """Bit for bit, with and without a rotation."""
    shape = SHAPES[1]
    k = random_vectors((9, shape.kv_heads, shape.head_dim), shape.dtype, 1, device)
    slots = StoreSlots(*(torch.arange(9, device=device),) * 3)
    zero = torch.zeros(shape.kv_heads, shape.head_dim, device=device)
    for rotation in (None, random_rotation(shape.head_dim, 2, device)):
        caches = [empty_cache(shape, 2, 2, device) for _ in range(2)]
        for cache, center in zip(caches, (None, zero), strict=True):
            layer = shape.format(SideTransform(rotation, None, center, 0.96), SideTransform(clip=0.92))
            store(cache, slots, k, k, prepare(layer, shape.dtype))
        for name in ("k_rows", "k_ring", "k_sink", "v_rows"):
            assert torch.equal(getattr(caches[0], name), getattr(caches[1], name))


@pytest.mark.parametrize("largest", [1.0, 20.0, 100.0])
def test_matrices_with_large_entries(largest: float, device: torch.device) -> None:
    """float16 terms of any scale: the product is that of the float32 matrix."""
    shape = Shape(dtype=torch.float16, head_dim=64)
    q = random_vectors((5, shape.q_heads, 64), shape.dtype, 1, device)
    spread = random_rotation(64, 2, device)
    spread[3, 5] = largest
    for matrix in (largest * torch.eye(64, device=device), spread):
        prepared = split_matrix(matrix, torch.float16)
        assert prepared is not None
        assert prepared.terms.isfinite().all()
        sums = prepared.terms[0].double().sum(0) / prepared.scale
        torch.testing.assert_close(sums, matrix.double(), rtol=2.0**-21, atol=largest * 2.0**-32)
        want = exact(q, matrix)
        bound = 2.0**-11 * want.abs() + 1e-5 * want.norm(dim=-1, keepdim=True)
        assert ((rotate(q, prepared).double() - want).abs() <= bound).all()
    with pytest.raises(ValueError, match="must be finite"):
        split_matrix(spread * float("inf"), torch.float16)


def test_vectors_that_do_not_fit_a_matrix(device: torch.device) -> None:
    """Another head_dim, dtype or number of heads is refused before anything is launched; no tokens are no launch."""
    matrix = split_matrix(torch.stack([random_rotation(64, seed, device) for seed in (1, 2)]), torch.bfloat16)
    assert matrix is not None
    x = random_vectors((3, 4, 64), torch.bfloat16, 1, device)
    for vectors, message in ((x[..., :32], "64"), (x.half(), "float16"), (x[:, :3], "2 kv heads"), (x[0], "64")):
        with pytest.raises(ValueError, match=message):
            rotate(vectors, matrix)
    assert rotate(x[:0], matrix).shape == (0, 4, 64)
    torch.testing.assert_close(rotate(x[::2, 1:3], matrix), rotate(x[::2, 1:3].contiguous(), matrix), rtol=0, atol=0)
