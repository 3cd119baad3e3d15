"""New matrices in the place of old ones: everything that was made of them is found, or nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.cuda.books import arranged_book, searched_points
from oscar_kernels.cuda.store import arrange
from oscar_kernels.format import AnyFormat, CutFormat, LayerFormat, SideFormat
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.refitting.in_place import put, replacements
from sglang_oscar.memory.layer import CachedLayer, CutLayer

HEADS, D = 2, 64
CPU = torch.device("cpu")


def made(seed: int, gain: float = 0.98, shared: bool = False) -> LayerFormat:
    """Keys with a dual, a center and a codebook, which may be ``shared``, values with a matrix."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.eye(D).repeat(HEADS, 1, 1) + 0.1 * torch.randn(HEADS, D, D, generator=random)
    center = torch.randn(HEADS, D, generator=random)
    points = torch.randn(HEADS, D // 4, 256, 4, generator=random)
    lengths = torch.ones(HEADS, D // 4)
    book = Codebook.from_shared(points[0, 0], lengths) if shared else Codebook.from_points(points)
    key = SideTransform(matrix, matrix.inverse().mT.contiguous(), center, gain=gain)
    value = SideTransform(torch.linalg.qr(torch.randn(D, D, generator=random)).Q)
    sides = SideFormat(D, transform=key, coding="codebook", codebook=book), SideFormat(D, transform=value)
    return LayerFormat(HEADS, D, *sides)


def cache_with(layer: AnyFormat, derived: list[Any]) -> Any:
    none: Any = None
    parts = tuple(CachedLayer(none, part) for part in layer.parts)
    layers = {3: parts[0] if len(parts) == 1 else CutLayer(parts)}
    return SimpleNamespace(layers=layers, derived=derived, seats=SimpleNamespace(device=CPU))


@pytest.mark.parametrize("shared", [False, True])
def test_everything_made_of_a_format_is_replaced(shared: bool) -> None:
    """What is worked out when it is first asked for, and what kernels prepare, stays where it is, with new content."""
    old, new = made(1, shared=shared), made(2, shared=shared)
    transform = old.key.transform
    worked_out = [transform.plain_center, old.value.transform.back, old.key.codebook.values]  # type: ignore[union-attr]
    prepared, book = prepare(old, torch.bfloat16), old.key.codebook
    assert book is not None
    arranged, books = arrange(prepared), [arranged_book(book), searched_points(book)]

    def derived(layer: Any, fresh: LayerFormat) -> Any:
        again, found = prepare(fresh, torch.bfloat16), fresh.key.codebook
        assert found is not None
        yield prepared, again
        yield arranged, arrange(again)
        yield from zip(books, [arranged_book(found), searched_points(found)], strict=True)

    put(replacements(cache_with(old, [derived]), {3: new}), CPU)
    assert torch.equal(transform.matrix, new.key.transform.matrix)  # type: ignore[arg-type]
    expected = [new.key.transform.plain_center, new.value.transform.back, new.key.codebook.values]  # type: ignore[union-attr]
    for at, what in zip(worked_out, expected, strict=True):
        assert torch.equal(at, what)  # type: ignore[arg-type]
    fresh = prepare(new, torch.bfloat16)
    for at, made_new in ((prepared, fresh), (arranged, arrange(fresh))):
        assert torch.equal(at.key.matrix.terms, made_new.key.matrix.terms)  # type: ignore[union-attr]
        assert torch.equal(at.key.reading.terms, made_new.key.reading.terms)  # type: ignore[union-attr]
        assert torch.equal(at.value.reading.terms, made_new.value.reading.terms)  # type: ignore[union-attr]
        assert torch.equal(at.key.center, made_new.key.center)  # type: ignore[arg-type]
    assert new.key.codebook is not None
    assert torch.equal(books[0], arranged_book(new.key.codebook))
    assert torch.equal(books[1], searched_points(new.key.codebook))


def test_parts_of_layers_are_replaced() -> None:
    """Each by its own; layers that would be cut elsewhere change nothing."""
    old, new = ([made(seed), made(seed + 1, gain=0.9)] for seed in (1, 3))
    cache, before = cache_with(CutFormat(tuple(old)), []), [part.key.transform.matrix for part in old]
    with pytest.raises(Int2Error, match="cannot cut layers elsewhere"):
        replacements(cache, {3: new[0]})
    with pytest.raises(Int2Error, match="a refit cannot replace"):
        replacements(cache, {3: CutFormat(tuple(new[::-1]))})
    put(replacements(cache, {3: CutFormat(tuple(new))}), CPU)
    for kept, part in zip(before, new, strict=True):
        assert torch.equal(kept, part.key.transform.matrix)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["gain", "coding", "dual"])
def test_other_rows_change_nothing(what: str) -> None:
    """Graphs hold numbers: only tensors of the same shape can be replaced."""
    old, new = made(1), made(2, gain=0.9 if what == "gain" else 0.98)
    if what == "coding":
        new = replace(new, key=replace(new.key, coding="affine", codebook=None))
    if what == "dual":
        new = new.with_transforms(replace(new.key.transform, dual=None), new.value.transform)
    before = old.key.transform.matrix
    assert before is not None
    kept = before.clone()
    with pytest.raises(Int2Error, match="a refit cannot replace"):
        replacements(cache_with(old, []), {3: new})
    assert torch.equal(before, kept)
