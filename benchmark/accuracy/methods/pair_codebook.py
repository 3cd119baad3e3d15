"""What a small vector codebook buys: the transforms of a recipe, and 16 points per pair of channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.codebooks import gaussian_book, nearest, product_book, refined
from accuracy.methods.base import RowMethod
from accuracy.methods.focus import ServedFocus
from accuracy.methods.plus import Plus
from accuracy.quantizers import lloyd_max
from oscar_kernels.codec import STRETCH

SAMPLES, ROUNDS = 20_000, 20
"""Pairs of calibration that a codebook is fitted to, evenly spaced; rounds of Lloyd's algorithm."""


def standardized(y: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of channels less their mean, over their standard deviation.

    Args:
        y: [..., d].
        group: channels, divides d.

    Returns:
        float32 [..., groups, group], and mean and deviation [..., groups, 1].
    """
    grouped = y.float().unflatten(-1, (-1, group))
    mean = grouped.mean(-1, keepdim=True)
    deviation = (grouped - mean).square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)
    return (grouped - mean) / deviation, mean, deviation


def read_back(y: torch.Tensor, book: torch.Tensor, group: int, gain: float) -> torch.Tensor:
    """Pairs of neighbours by the nearest point, with a scale and an offset per group fitted to the points, in bfloat16.

    They are fitted as those of ``plus``: what is read back has the mean of what was stored and, along it, ``gain`` of
    its length.

    Args:
        y: [..., d].
        book: [16, 2].
        group: channels that share scale and offset.
        gain: at most 1.

    Returns:
        float32 [..., d].
    """
    x, mean, deviation = standardized(y, group)
    points = book.to(x)[nearest(x.unflatten(-1, (-1, 2)), book.to(x))].flatten(-2)
    level = points.mean(-1, keepdim=True)
    along = ((points - level) * x).sum(-1, keepdim=True)
    factor = torch.where(along > 0, gain * x.square().sum(-1, keepdim=True) / along, 1).clamp(1 / STRETCH, STRETCH)
    scale = (deviation * factor).bfloat16().float()
    offset = (mean - scale * level).bfloat16().float()
    return (scale * points + offset).flatten(-2)


@dataclass
class PairCodes(RowMethod):
    """A recipe with other codes and the same bytes: an index of four bits per pair of neighbouring channels. The class
    of the recipe stands behind this one among the bases.

    Not served: the codes of a pair would be looked up instead of computed.

    Attributes:
        points: "gaussian", the best 16 for a normal pair; "calibration", fitted to each layer's keys and values; or
            "levels", the 16 pairs of four Lloyd-Max levels, which a scalar quantizer has too: the comparison that says
            what the second dimension is worth.
    """

    points: str = "gaussian"
    source: str = "this project; Lloyd 1982 and Linde, Buzo, Gray 1980 for the codebook"

    def fit(self, calibration: Calibration) -> None:
        """Transforms of the recipe, and a codebook per layer and side."""
        super().fit(calibration)
        fixed = product_book(tuple(lloyd_max(2)[0].tolist())) if self.points == "levels" else gaussian_book()
        fixed = fixed.float().to(calibration.device)
        self.books = [(fixed, fixed)] * len(calibration.layers)
        if self.points == "calibration":
            self.books = [
                (
                    self._fitted(self.key.into(n, x.k.transpose(0, 1)[None]), fixed),
                    self._fitted(self.value.into(n, x.v.transpose(0, 1)[None]), fixed),
                )
                for n, x in enumerate(calibration.layers)
            ]

    def _fitted(self, y: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        pairs = standardized(y, min(self.group, y.shape[-1]))[0].reshape(-1, 2)
        chosen = pairs[:: max(1, len(pairs) // SAMPLES)]
        return refined(begin, chosen, torch.ones_like(chosen[:, 0]), ROUNDS)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        y = self.key.into(layer, k)
        return self.key.out(layer, read_back(y, self.books[layer][0], min(self.group, y.shape[-1]), self.k_gain))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        y = self.value.into(layer, v)
        return self.value.out(layer, read_back(y, self.books[layer][1], min(self.group, y.shape[-1]), self.v_gain))


@dataclass
class PairCodebook(PairCodes, Plus):
    """The transforms of ``plus``."""


@dataclass
class FocusPairs(PairCodes, ServedFocus):
    """The transforms of ``focus`` as it is served."""


def variant(label: str, group: int, points: str, table: str = "codebooks") -> Callable[[], PairCodebook]:
    """One row."""
    return partial(PairCodebook, label=label, group=group, points=points, table=table)


METHODS = [
    variant("16 points per pair", 128, "gaussian", "methods"),
    variant("16 points per pair", 64, "gaussian", "methods"),
    *(
        variant(label, group, points)
        for group in (128, 64)
        for label, points in (("Lloyd-Max levels", "levels"), ("16 points per pair, of calibration", "calibration"))
    ),
    partial(FocusPairs, group=128, label="16 points per pair, of calibration", points="calibration", table="codebooks"),
    partial(
        FocusPairs,
        label="calibrated on all kinds, 41K tokens, 16 points per pair, of calibration",
        domain="broad",
        points="calibration",
        table="broad codebooks",
    ),
]
