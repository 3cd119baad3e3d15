"""Transforms and formats of layers: algebra in float64, slices of heads, refusals and the fingerprint of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import random_rotation, random_transform

from oscar_kernels import format as formats
from oscar_kernels.codebook import Codebook
from oscar_kernels.format import LayerFormat, SideFormat, fingerprint, mean_bits
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC, RowLayout
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform

D, HEADS = 64, 4


def per_head(x: torch.Tensor | None) -> torch.Tensor:
    """float64 [HEADS, D, D] of a shared or a per-head matrix."""
    assert x is not None
    return x.double().expand(HEADS, D, D)


@pytest.mark.parametrize("heads", [None, HEADS])
def test_reading_undoes_writing(heads: int | None) -> None:
    """q D . (x T - c) = q . (x - plain_center), and x T back = x, whatever the matrix."""
    center = torch.randn(HEADS, D, generator=torch.Generator().manual_seed(1))
    transform = SideTransform(*random_transform(D, 2, heads), center)
    x = torch.randn(HEADS, 1, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q = torch.randn(HEADS, D, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    stored = x @ per_head(transform.matrix)
    read = (stored - center.double()[:, None]) @ (q.mT @ per_head(transform.reading)).mT
    assert transform.plain_center is not None
    plain = (x - transform.plain_center.double()[:, None]) @ q
    torch.testing.assert_close(read, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stored @ per_head(transform.back), x, rtol=1e-4, atol=1e-4)


def test_an_orthogonal_matrix_reads_itself() -> None:
    rotation = random_rotation(D, 7, torch.device("cpu"))
    center = torch.randn(HEADS, D, generator=torch.Generator().manual_seed(8))
    transform = SideTransform(rotation, center=center)
    assert transform.reading is rotation
    assert transform.back is not None
    assert transform.back.is_contiguous()
    assert torch.equal(transform.back, rotation.T)
    assert transform.plain_center is not None
    torch.testing.assert_close(transform.plain_center @ rotation, center, atol=1e-5, rtol=1e-5)
    bare = SideTransform(center=center)
    assert (bare.reading, bare.back) == (None, None)
    assert bare.plain_center is center


def test_heads_of_a_rank() -> None:
    """Tensors per head are cut, shared ones stay the same object; ranks together have every head once."""
    matrix, dual = random_transform(D, 1, HEADS)
    shared, shared_dual = random_transform(D, 2)
    center = torch.randn(HEADS, D, generator=torch.Generator().manual_seed(3))
    key = SideFormat(64, transform=SideTransform(matrix, dual, center, 0.96, 0.98))
    value = SideFormat(32, transform=SideTransform(shared, shared_dual, clip=0.92))
    whole = LayerFormat(HEADS, D, key, value)
    ranks = [whole.of_heads(slice(first, first + 1)) for first in range(HEADS)]
    for head, rank in enumerate(ranks):
        own = rank.key.transform
        assert rank.kv_heads == own.kv_heads == 1
        assert own.per_head
        assert own.matrix is not None
        assert own.dual is not None
        assert own.center is not None
        assert torch.equal(own.matrix, matrix[head : head + 1])
        assert torch.equal(own.dual, dual[head : head + 1])
        assert torch.equal(own.center, center[head : head + 1])
        assert (own.clip, own.gain) == (0.96, 0.98)
        assert rank.value.transform is value.transform
    assert sum(rank.cell_bytes for rank in ranks) == whole.cell_bytes
    centered = SideTransform(shared, center=center).of_heads(slice(1, 3))
    assert centered.matrix is shared
    assert centered.center is not None
    assert torch.equal(centered.center, center[1:3])


def test_sides_have_rows_of_their_own() -> None:
    layer = LayerFormat(8, 128, SideFormat(64), SideFormat(128, torch.float32))
    assert layer.key_layout == RowLayout(8, 128, 64)
    assert layer.value_layout == RowLayout(8, 128, 128, torch.float32)
    assert layer.cell_bytes == 8 * (32 + 8) + 8 * (32 + 8)
    assert layer.elements == 2048
    assert mean_bits([layer, LayerFormat(8, 128, SideFormat(128), SideFormat(128))]) == (2.5 + 2.25) / 2


EYE = torch.eye(D)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SideFormat(64, coding=CODEBOOK), "needs a codebook; coding codebook has none"),
        (lambda: SideFormat(64, codebook=small_book(1)), "needs a codebook; coding affine has one"),
        (lambda: LayerFormat(1, D, with_book(small_book(HEADS)), SideFormat(64)), "codebook is for 4 kv heads of 64"),
        (lambda: LayerFormat(1, D, SideFormat(64), with_book(small_book(1))), "values cannot have a codebook"),
        (lambda: SideTransform(EYE.double()), "matrix of a transform must be float32"),
        (lambda: SideTransform(EYE[0]), "matrix must be"),
        (lambda: SideTransform(EYE[:32]), "matrix must be"),
        (lambda: SideTransform(dual=EYE), "dual must have the shape of the matrix"),
        (lambda: SideTransform(EYE, EYE[None]), "dual must have the shape of the matrix"),
        (lambda: SideTransform(center=EYE[0]), r"center must be \[kv_heads"),
        (lambda: SideTransform(EYE, center=torch.zeros(2, 32)), "does not fit the matrix"),
        (lambda: SideTransform(EYE.repeat(3, 1, 1), center=torch.zeros(2, D)), "does not fit the matrix"),
        (lambda: SideTransform(clip=0.0), "clip must be"),
        (lambda: SideTransform(clip=1.5), "clip must be"),
        (lambda: SideTransform(clip=float("nan")), "clip must be"),
        (lambda: SideTransform(gain=-1.0), "gain must be"),
        (lambda: SideTransform(gain=float("inf")), "gain must be"),
        (lambda: layer_of(SideTransform(EYE[:32, :32])), "key transform is for 4 kv heads of 32"),
        (lambda: layer_of(SideTransform(EYE.repeat(2, 1, 1))), "key transform is for 2 kv heads of 64"),
        (lambda: layer_of(SideTransform(), SideTransform(center=torch.zeros(HEADS, D))), "values cannot be centered"),
        (lambda: LayerFormat(1, D, SideFormat(64, bits=5), SideFormat(64)), "bits must be one of 2, 3, 4, 16"),
        (lambda: LayerFormat(1, D, SideFormat(48), SideFormat(64)), "group_size must be a power of two"),
    ],
)
def test_refusals_are_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def small_book(heads: int) -> Codebook:
    points = torch.arange(heads * D // 4 * 1024) % 251 - 125
    return Codebook(points.to(torch.int8).view(heads, D // 4, 256, 4), torch.ones(heads, D // 4))


def with_book(book: Codebook) -> SideFormat:
    return SideFormat(64, coding=CODEBOOK, codebook=book)


def layer_of(key: SideTransform, value: SideTransform | None = None) -> LayerFormat:
    return LayerFormat(
        HEADS, D, SideFormat(64, transform=key), SideFormat(64, transform=value or SideTransform(clip=0.92))
    )


def small_model() -> dict[int, LayerFormat]:
    """Two layers with numbers that are exact in every arithmetic."""
    matrix = torch.arange(D * D).view(D, D) / 64
    centers = torch.arange(HEADS * D).view(HEADS, D) / 4
    return {
        0: layer_of(SideTransform(matrix.float(), None, centers.float(), 0.96, 0.98)),
        7: layer_of(SideTransform(matrix.float(), 2 * matrix.float())),
    }


def test_fingerprint_is_pinned() -> None:
    """It identifies caches that outlive a server: it may change only with the meaning of stored bytes."""
    assert fingerprint(small_model()) == "5bd0b108480ca9233382dff200acfcf6637eb950ad8651ab386fc2685bd44e21"


def test_fingerprint_is_of_contents() -> None:
    """Neither order of layers nor identity, memory layout or laziness of tensors counts."""
    model = small_model()
    matrix = model[0].key.transform.matrix
    assert matrix is not None
    transposed = replace(model[0].key.transform, matrix=matrix.T.contiguous().T)
    again = {7: model[7].to("cpu"), 0: model[0].with_transforms(transposed, model[0].value.transform)}
    _ = again[7].key.transform.back
    assert fingerprint(again) == fingerprint(model)


def test_fingerprint_tells_all_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every single change of what rows mean is another fingerprint."""
    base = small_model()
    layer, key = base[0], base[0].key
    matrix, center = key.transform.matrix, key.transform.center
    assert matrix is not None
    assert center is not None
    nudged = matrix.clone()
    nudged[5, 9] = torch.nextafter(nudged[5, 9], torch.tensor(torch.inf))
    changes = [
        {"clip": 0.961},
        {"gain": 0.97},
        {"matrix": nudged},
        {"matrix": None},
        {"matrix": matrix.repeat(HEADS, 1, 1)},
        {"dual": matrix},
        {"center": center + 1},
        {"center": None},
    ]
    variants = [replace(layer, key=replace(key, transform=replace(key.transform, **change))) for change in changes]
    variants += [
        replace(layer, key=replace(key, group_size=32)),
        replace(layer, key=replace(key, bits=3)),
        replace(layer, key=replace(key, scale_dtype=torch.float16)),
        replace(layer, key=layer.value, value=replace(key, transform=replace(key.transform, center=None))),
    ]
    seen = {fingerprint(base), *(fingerprint({**base, 0: variant}) for variant in variants)}
    seen |= {fingerprint({0: base[0]}), fingerprint({0: base[0], 8: base[7]}), fingerprint({0: base[7], 7: base[0]})}
    monkeypatch.setattr(formats, "AFFINE_VERSION", 99)
    seen.add(fingerprint(base))
    assert len(seen) == len(variants) + 5


def test_fingerprint_of_a_side_left_exact() -> None:
    """Its dtype and transform count; group, scale dtype, clip ratio and gain mean nothing to its bytes."""
    base = small_model()
    layer, key = base[0], replace(base[0].key, bits=16)
    said = {**base, 0: replace(layer, key=key)}
    for change in ({"group_size": 32}, {"scale_dtype": torch.float32}):
        assert fingerprint({**base, 0: replace(layer, key=replace(key, **change))}) == fingerprint(said)
    looser = replace(key, transform=replace(key.transform, clip=0.5, gain=0.0))
    assert fingerprint({**base, 0: replace(layer, key=looser)}) == fingerprint(said)
    plain = replace(key, transform=SideTransform())
    half, values = replace(key, exact_dtype=torch.float16), replace(layer.value, bits=16)
    others = [replace(layer, key=plain), replace(layer, key=half), replace(layer, value=values), layer]
    assert len({fingerprint(said), *(fingerprint({**base, 0: other}) for other in others)}) == 5


def test_fingerprint_of_codings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pinned, tells codings and the bytes of a book apart, and has the version that such rows came with."""
    base, book = small_model(), small_book(HEADS)
    layer, key = base[0], replace(base[0].key, coding=CODEBOOK, codebook=book)
    said = {**base, 0: replace(layer, key=key, value=replace(layer.value, coding=SYMMETRIC))}
    assert fingerprint(said) == "aa4523db99adec7cb679f7c80bceaa5c56c3c82fa00acdd5a2c7b71c653c5162"
    looser = replace(key, group_size=32, transform=replace(key.transform, clip=0.5))
    assert fingerprint({**said, 0: replace(said[0], key=looser)}) == fingerprint(said)
    points, factor = book.points.clone(), book.factor.clone()
    points[1, 2, 3, 0] += 1
    factor[1, 2] = torch.nextafter(factor[1, 2], torch.tensor(2.0))
    keys = [replace(key, codebook=Codebook(*of)) for of in ((points, book.factor), (book.points, factor))]
    keys += [replace(key, transform=replace(key.transform, gain=0.5)), replace(key, scale_dtype=torch.float16)]
    keys += [replace(key, coding=coding, codebook=None) for coding in (AFFINE, SYMMETRIC)]
    seen = {fingerprint(said), fingerprint({**said, 0: replace(said[0], value=layer.value)})}
    seen |= {fingerprint({**said, 0: replace(said[0], key=other)}) for other in keys}
    monkeypatch.setattr(formats, "FORMAT_VERSION", 99)
    seen.add(fingerprint(said))
    assert len(seen) == len(keys) + 3


def test_books_of_a_rank() -> None:
    """A rank has the points of its heads, on any device, in kernels' form, too."""
    book = small_book(HEADS)
    whole = LayerFormat(HEADS, D, with_book(book), SideFormat(64, coding=SYMMETRIC))
    own = whole.of_heads(slice(1, 3))
    moved = own.to("cpu").key.codebook
    assert moved is not None
    assert torch.equal(moved.points, book.points[1:3])
    assert torch.equal(moved.factor, book.factor[1:3])
    assert prepare(own, torch.bfloat16).key.codebook is own.key.codebook
    assert (own.value.coding, own.value_layout.coding) == (SYMMETRIC, SYMMETRIC)
    assert (whole.cell_bytes, mean_bits([whole])) == (2 * HEADS * 18, 2.25)


def test_sizes_of_a_side_left_exact() -> None:
    layer = LayerFormat(8, 128, SideFormat(128, bits=16), SideFormat(128))
    assert layer.cell_bytes == 8 * (256 + 36)
    assert mean_bits([layer]) == (16 + 2.25) / 2
    assert formats.code_widths([layer]) == "keys 16, values 2"


def test_prepared_terms_sum_to_the_matrix() -> None:
    """In float64, relative to float32: shared or per head, keys' duals and values' backs."""
    for heads in (None, HEADS):
        key, value = (SideTransform(*random_transform(D, seed, heads)) for seed in (1, 2))
        for dtype in (torch.bfloat16, torch.float16):
            prepared = prepare(layer_of(key, value), dtype)
            for split, matrix in (
                (prepared.key.matrix, key.matrix),
                (prepared.key.reading, key.dual),
                (prepared.value.matrix, value.matrix),
                (prepared.value.reading, value.back),
            ):
                assert split is not None
                assert matrix is not None
                assert split.sets == (heads or 1)
                summed = split.terms.double().sum(1) / split.scale
                torch.testing.assert_close(summed, matrix.double().view_as(summed), rtol=2**-20, atol=2**-22)
