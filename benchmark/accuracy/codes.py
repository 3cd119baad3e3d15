"""How the rows of one kv head may be stored: an index for one, two or four channels, and one or two numbers a row.

A scalar code is an index of one channel. Books of points are fitted to calibration rows, for a group of channels of a
kv head each, or shared; or they are those of a normal distribution, the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from accuracy.codebooks import gaussian_book, gaussian_fours, read_rows
from accuracy.quantizers import SIXTEEN, lloyd_max
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.group_books import GroupBooks, fitted_books, rms, shared_book
from oscar_rotation.recipes.plus import KEY_ROWS, VALUE_ROWS

ROUNDS, SAMPLES = 20, 1 << 18
"""Of Lloyd's algorithm; groups of channels, about, that a book of several groups is fitted to."""

Rows = tuple[torch.Tensor, torch.Tensor]
"""What books are fitted to: rows behind the transform, float32 [kv_heads, n, d], and what each counts,
[kv_heads, n]."""

Read = Callable[[torch.Tensor], torch.Tensor]
"""[batch, kv_heads, n, d] behind the transform -> float32 of that shape, as stored rows give it back."""


@dataclass(frozen=True)
class Code:
    """A way to store rows.

    Attributes:
        points: that an index chooses from.
        channels: that share an index.
        book: whose points are its own: a "group" of channels of a kv head; a kv "head", all groups; a "place", the
            group of this number in all kv heads of a layer; a "layer"; a layer, "scaled" by a factor for each place of
            each kv head; the "model". "normal": the points of a normal
            distribution. "served": scalar codes with scales and zero points as the server stores them.
        offset: whether a row has a second number of 16 bits, its mean; always with "served".
        part: of the calibration rows that books are fitted to, from the first on.
        refined: whether points are moved further on what attention loses (:mod:`accuracy.book_refinement`); for keys.
    """

    points: int
    channels: int = 4
    book: str = "group"
    offset: bool = False
    part: float = 1.0
    refined: bool = False

    def __str__(self) -> str:
        return f"{self.points} points for {self.channels} channels, {self.book}"

    @property
    def rate(self) -> float:
        """Bits of an index, per channel."""
        return math.log2(self.points) / self.channels

    def bits(self, head_dim: int) -> float:
        """Bits per element, scales and offsets included."""
        return self.rate + (2 if self.offset else 1) * SIXTEEN / head_dim

    @property
    def key_gain(self) -> float:
        """Part of its length that a key is read with: as of scalars of two and three bits, less below (not tuned)."""
        if self.rate < 2:
            return 0.94 if self.rate < 1.5 else 0.96
        return KEY_ROWS[2 if self.rate < 2.5 else 3][1]

    def reader(self, books: GroupBooks | None, keys: bool) -> Read:
        """What gives rows back.

        Args:
            books: of the kv heads that are read; None for a "served" code.
            keys: whether rows are keys.
        """
        if books is None:
            row = (KEY_ROWS if keys else VALUE_ROWS)[round(self.rate)]
            return lambda y: coded(y, y.shape[-1], *row, self.points)
        return lambda y: read_rows(y, books, self.key_gain if keys else 1.0, self.offset)


def scalar(bits: int) -> Code:
    """Codes with zero points, as served."""
    return Code(1 << bits, 1, "served", offset=True)


def normal_points(code: Code) -> torch.Tensor:
    """Points for a normal distribution, float32 [points, channels].

    Raises:
        ValueError: pairs of other than 16 points.
    """
    if code.channels == 1:
        return lloyd_max(round(code.rate))[0].float()[:, None]
    if code.channels == 4:
        return gaussian_fours(code.points)
    if code.points != len(gaussian_book()):
        raise ValueError(f"there are {len(gaussian_book())} points for a normal pair, not {code.points}")
    return gaussian_book().float()


def books_of(code: Code, layers: int, rows: Callable[[int], Rows]) -> Sequence[GroupBooks | None]:
    """Books of every layer.

    Args:
        code: what they are for.
        layers: how many.
        rows: of a layer.
    """
    if code.book == "served":
        return [None] * layers
    first = rows(0)[0]
    heads, groups = first.shape[0], first.shape[2] // code.channels
    if code.book in ("normal", "model"):
        points = (
            normal_points(code).to(first.device)
            if code.book == "normal"
            else _shared(code, [_scaled(code, rows(n), layers) for n in range(layers)])[0, 0]
        )
        return [GroupBooks(points.expand(heads, groups, -1, -1))] * layers
    found = []
    for layer in range(layers):
        x, weights = _scaled(code, rows(layer))
        if code.book in ("group", "place"):
            if code.book == "place":
                x, weights = x.flatten(0, 1)[None], weights.flatten()[None]
            points = fitted_books(x, weights, code.channels, code.points, ROUNDS, layer).points
        elif code.book == "scaled":
            book, lengths = shared_book(x, weights, code.channels, code.points, ROUNDS, layer)
            points = lengths[..., None, None] * book
        elif code.book == "head":
            points = torch.cat([_shared(code, [(x[h], weights[h])], layer) for h in range(heads)])
        else:
            points = _shared(code, [(x.flatten(0, 1), weights.flatten())], layer)
        found.append(GroupBooks(points.expand(heads, groups, -1, -1)))
    return found


def _scaled(code: Code, rows: Rows, step: int = 0) -> Rows:
    """Rows as their points see them, less their mean where it is stored, over their root mean square; errors count as
    they are, not relative to a row's length. With a ``step`` all kv heads together, [rows, d], one row in so many."""
    y, weights = (x[:, : max(code.points, int(code.part * x.shape[1]))] for x in rows)
    if code.offset:
        y = y - y.mean(-1, keepdim=True)
    size = rms(y)
    x, weights = y / size, weights * size[..., 0].square()
    if not step:
        return x, weights
    return x[:, ::step].flatten(0, 1), weights[:, ::step].flatten()


def _shared(code: Code, parts: Sequence[Rows], seed: int = 0) -> torch.Tensor:
    """One book for all groups of rows [n, d]: [1, 1, points, channels]."""
    groups = parts[0][0].shape[-1] // code.channels
    step = max(1, groups * sum(len(rows) for rows, _ in parts) // SAMPLES)
    x = torch.cat([rows[::step].unflatten(-1, (-1, code.channels)).flatten(0, 1) for rows, _ in parts])
    weights = torch.cat([w[::step].repeat_interleave(groups) for _, w in parts])
    return fitted_books(x[None], weights[None], code.channels, code.points, ROUNDS, seed).points
