"""How codes of one side are made at every width: what they stand for, clip ratio and gain, and the books of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from oscar_kernels.layout import AFFINE, CODEBOOK, EXACT
from oscar_rotation.files.by_head import ByHead, alike, flat
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bit_goal import coding_at
from oscar_rotation.math.fitted_rows import coded, coded_by_book, coded_symmetric

Row = tuple[float, float]
"""Clip ratio and gain of a row."""

NOTHING: Row = (1.0, 1.0)
"""What a file states for a layer that is left exact, of which neither is read."""

Reading = Callable[[torch.Tensor, int], torch.Tensor]
"""Vectors and bits of a code -> the vectors as a cache gives them back."""


@dataclass(frozen=True)
class SideCodes:
    """Codes of the keys, or of the values, of all layers.

    Attributes:
        rows: clip ratio and gain of affine codes, by bits.
        coding: asked for, of all layers or of each, or of each of its kv heads; widths that do not have it are affine
            (:func:`oscar_rotation.fit.bit_goal.coding_at`).
        books: of all layers where the coding is codebook.
        gains: of codebooks, by layer; empty for those of the rows.
    """

    rows: Mapping[int, Row]
    coding: str | tuple[ByHead[str], ...] = AFFINE
    books: Codebooks | None = None
    gains: tuple[float, ...] = ()

    def coding_of(self, layer: int, bits: int, head: int = 0) -> str:
        """Coding of a layer, or of a kv head of one, with codes of so many bits."""
        asked = self.coding if isinstance(self.coding, str) else self.coding[layer]
        return coding_at(asked[head] if isinstance(asked, tuple) else asked, bits)

    def row(self, bits: int, layer: int, head: int = 0) -> Row:
        """Clip ratio and gain; only affine codes are clipped, others have no range that a large number would widen."""
        if bits == EXACT:
            return NOTHING
        (clip, gain), coding = self.rows[bits], self.coding_of(layer, bits, head)
        if coding == CODEBOOK and self.gains:
            gain = self.gains[layer]
        return (clip if coding == AFFINE else 1.0), gain

    def by_head(self, layer: int, bits: ByHead[int]) -> list[tuple[int, str, float, float]]:
        """Bits, coding, clip ratio and gain of a layer: once, or of each kv head."""
        asked = AFFINE if isinstance(self.coding, str) else self.coding[layer]
        heads = next((len(x) for x in (bits, asked) if isinstance(x, tuple)), 1)
        each = bits if isinstance(bits, tuple) else (bits,) * heads
        return [(x, self.coding_of(layer, x, head), *self.row(x, layer, head)) for head, x in enumerate(each)]

    def coded(self, y: torch.Tensor, layer: int, bits: int, group: int) -> torch.Tensor:
        """What stored rows of a layer give back.

        Args:
            y: [kv_heads, n, head_dim], behind the transform.
            layer: which one.
            bits: of a code.
            group: channels that share a scale.
        """
        coding = self.coding_of(layer, bits)
        if coding == AFFINE:
            return coded(y, group, *self.rows[bits], levels=1 << bits)
        if coding == CODEBOOK:
            assert self.books is not None
            return coded_by_book(y, self.books.of_layer(layer).to(y.device), [self.row(bits, layer)[1]])[0]
        return coded_symmetric(y, group, self.row(bits, layer)[1], bits)


def with_bits(rotations: RotationSet, bits: Sequence[ByHead[int]], codes: SideCodes) -> RotationSet:
    """The same for codes of other widths: clip ratios, gains and codings follow. Layers that are left exact have the
    identity.

    Args:
        rotations: of one side.
        bits: by layer, or by kv head of one.
        codes: of that side.
    """
    exact = torch.tensor([width == EXACT for width in bits])
    if bool(exact.any()):
        rotations = _left_alone(rotations, exact)
    rows = [codes.by_head(layer, width) for layer, width in enumerate(bits)]
    widths = tuple(alike(width for width, *_ in heads) for heads in rows)
    codings = tuple(alike(coding for _, coding, *_ in heads) for heads in rows)
    return replace(
        rotations,
        clip_ratios=tuple(alike(clip for *_, clip, _ in heads) for heads in rows),
        gains=tuple(alike(gain for *_, gain in heads) for heads in rows),
        bits=None if set(widths) == {2} else widths,
        codings=None if set(codings) == {AFFINE} else codings,
        codebooks=_books_of(codes, codings),
    )


def _books_of(codes: SideCodes, codings: Sequence[ByHead[str]]) -> Codebooks | None:
    if codes.books is None or CODEBOOK not in flat(codings):
        return None
    used = torch.zeros(codes.books.factors.shape[:2], dtype=torch.bool)
    for layer, coding in enumerate(codings):
        used[layer] = torch.tensor([x == CODEBOOK for x in flat([coding])])
    return codes.books.only(used)


def _left_alone(rotations: RotationSet, layers: torch.Tensor) -> RotationSet:
    """The same with nothing done to the vectors of some layers, bool [layers]."""
    unit = torch.eye(rotations.head_dim)

    def other(x: torch.Tensor | None, to: torch.Tensor) -> torch.Tensor | None:
        return None if x is None else torch.where(layers.view(-1, *[1] * (x.ndim - 1)), to, x)

    matrices = other(rotations.rotations, unit)
    assert matrices is not None
    duals, centers = other(rotations.duals, unit), other(rotations.centers, torch.zeros(()))
    return replace(rotations, rotations=matrices, duals=duals, centers=centers)


def of_layer(tensors: torch.Tensor, layer: int, per_head: bool, device: torch.device) -> torch.Tensor:
    """Matrices of a layer, [kv_heads, d, d], or [1, d, d] where heads share one."""
    found = tensors[layer].to(device)
    return found if per_head else found[None]


def into(rotations: RotationSet, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Vectors of one layer behind its transform and center: [kv_heads, n, d] -> float32 of that shape."""
    y = x @ of_layer(rotations.rotations, layer, rotations.per_head, x.device)
    return y if rotations.centers is None else y - rotations.centers[layer].to(x.device)[:, None]


def out_of(rotations: RotationSet, layer: int, y: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`into`."""
    if rotations.centers is not None:
        y = y + rotations.centers[layer].to(y.device)[:, None]
    back = rotations.rotations if rotations.duals is None else rotations.duals
    return y @ of_layer(back, layer, rotations.per_head, y.device).mT


def reading(rotations: RotationSet, layer: int, codes: SideCodes, group: int) -> Reading:
    """How a cache gives back the keys or values of one layer.

    Args:
        rotations: of one side.
        layer: which one.
        codes: of that side.
        group: channels that share a scale.
    """

    def read(x: torch.Tensor, bits: int) -> torch.Tensor:
        return out_of(rotations, layer, codes.coded(into(rotations, layer, x), layer, bits, group))

    return read
