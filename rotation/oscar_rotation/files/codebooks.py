"""Codings and codebooks of a rotation file, and the checks that they pass before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oscar_kernels.codebook import GROUP, LARGEST, POINTS, Codebook
from oscar_kernels.layout import AFFINE, CODEBOOK, CODINGS, EXACT
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import shown
from oscar_rotation.files.by_head import flat


@dataclass(frozen=True)
class Codebooks:
    """Codebooks of all layers of a side, as a file holds them; of layers and kv heads without one it is zeros.

    Attributes:
        points: int8 [layers, kv_heads, head_dim / 4, 256, 4].
        factors: float32 [layers, kv_heads, head_dim / 4].
    """

    points: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of_layers(cls, books: Sequence[Codebook | None]) -> Codebooks:
        """From those of single layers, on the CPU; one at least is there, and all have the same heads."""
        some = next(book for book in books if book is not None)
        points = torch.zeros(len(books), *some.points.shape, dtype=torch.int8)
        factors = torch.zeros(len(books), *some.factor.shape)
        for layer, book in enumerate(books):
            if book is not None:
                points[layer], factors[layer] = book.points.cpu(), book.factor.cpu()
        return cls(points, factors)

    def of_layer(self, layer: int, heads: slice = slice(None)) -> Codebook:
        """The codebook of a layer, or of kv heads of one, that have one."""
        return Codebook(self.points[layer, heads].contiguous(), self.factors[layer, heads].contiguous())

    def only(self, used: torch.Tensor) -> Codebooks:
        """The same with zeros in place of those that are not used; bool [layers, kv_heads]."""
        return Codebooks(
            torch.where(used[..., None, None, None], self.points, 0), torch.where(used[..., None], self.factors, 0.0)
        )


def check_codings(loaded: Any, source: str) -> None:
    """Refuse codings that no server could use, and codebooks that do not belong to them.

    Args:
        loaded: the RotationSet that was read; its rotations and bits are checked.
        source: the file's path, for the message.

    Raises:
        RotationFileError: codings of other layers, unknown or with bits that do not fit; codebooks that are missing, of
            another shape or dtype, of values, or not finite.
    """
    codings, books = loaded.codings, loaded.codebooks
    if codings is not None:
        every = [(layer, run) for layer in range(loaded.num_layers) for run in loaded.runs(layer)]
        for layer, (_, width, coding, *_) in every:
            if coding not in CODINGS:
                raise RotationFileError(
                    f"{source}: coding {shown(coding)}, this release knows {', '.join(CODINGS)}; update sglang-oscar"
                )
            if (coding == CODEBOOK and width != 2) or (coding != AFFINE and width == EXACT):
                raise RotationFileError(
                    f"{source}: coding {coding} of layer {layer} does not go with {width} bits; fit it again"
                )
    with_books = [layer for layer, coding in enumerate(codings or ()) if CODEBOOK in flat([coding])]
    if bool(with_books) != (books is not None):
        said = (
            "has the coding codebook, but no codebooks" if with_books else "holds codebooks that no layer is coded by"
        )
        raise RotationFileError(f"{source}: {said}; fit it again")
    if books is not None:
        _check_books(books, loaded, source)


def _check_books(books: Codebooks, loaded: Any, source: str) -> None:
    if loaded.metadata.side == "v":
        raise RotationFileError(f"{source}: holds codebooks of values, only keys have them; fit it again")
    points, factors = books.points, books.factors
    heads = points.shape[1] if points.ndim == 5 else 0
    shape = (loaded.num_layers, heads, loaded.head_dim // GROUP, POINTS, GROUP)
    if not heads or tuple(points.shape) != shape or points.dtype != torch.int8 or loaded.head_dim % GROUP:
        raise RotationFileError(
            f"{source}: codebook points are {points.dtype} {list(points.shape)}, expected torch.int8 "
            f"[{loaded.num_layers}, kv_heads, {loaded.head_dim // GROUP}, {POINTS}, {GROUP}]"
        )
    if factors.shape != points.shape[:3] or factors.dtype != torch.float32:
        raise RotationFileError(
            f"{source}: codebook factors are {factors.dtype} {list(factors.shape)}, expected torch.float32 "
            f"{list(points.shape[:3])}"
        )
    for name, x, of_head in (
        ("rotations", loaded.rotations, loaded.per_head),
        ("centers", loaded.centers, loaded.centers is not None),
    ):
        if of_head and x is not None and x.shape[1] != heads:
            raise RotationFileError(f"{source}: has codebooks of {heads} kv heads, but {name} of {x.shape[1]}")
    used = torch.zeros(loaded.num_layers, heads, dtype=torch.bool)
    for layer, x in enumerate(used):
        for run in loaded.runs(layer):
            x[run.heads] = run.coding == CODEBOOK
    if not bool(((factors[used] > 0) & factors[used].isfinite()).all()) or bool((factors[~used] != 0).any()):
        raise RotationFileError(
            f"{source}: codebook factors must be positive, finite, and 0 in layers without a codebook; fit it again"
        )
    if bool((points < -LARGEST).any()):
        raise RotationFileError(f"{source}: codebook points must be from -{LARGEST} to {LARGEST}; fit it again")
