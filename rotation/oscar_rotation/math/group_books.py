"""Points for groups of neighbouring channels, found by k-means: what a codebook is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK_ROWS = 4096
"""Rows of a book whose nearest points are looked for at a time."""
BLOCK_SCORES = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Products of rows and points at a time: as many as a GPU keeps busy with, as few as a CPU's cache holds."""


@dataclass(frozen=True)
class GroupBooks:
    """A book for every kv head and every group of neighbouring channels.

    Attributes:
        points: float32 [heads, groups, points, channels].
    """

    points: torch.Tensor

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Every group of channels replaced by the nearest point of its book: [heads, n, d] -> float32 of that shape."""
        grouped = self._grouped(x)
        out = torch.empty_like(grouped)
        for some, span, points, scores in self._scores(grouped):
            index = scores.argmax(1)
            out[some, span] = points.gather(1, index[..., None].expand(-1, -1, points.shape[2]))
        return out.unflatten(0, self.points.shape[:2]).transpose(1, 2).flatten(2)

    def refined(self, x: torch.Tensor, weights: torch.Tensor, rounds: int = 1) -> GroupBooks:
        """Lloyd's algorithm: every point moved to the mean of the rows nearest to it; a point that nothing is near to
        stays. Of points that are equally near to a row all are moved by it.

        Args:
            x: [heads, n, d].
            weights: [heads, n], of the rows.
            rounds: how often.
        """
        grouped = self._grouped(x)
        heavy = weights.float()[:, None].expand(-1, self.points.shape[1], -1).flatten(0, 1)[..., None]
        sums = torch.cat([grouped * heavy, heavy], -1)
        books = self
        for _ in range(rounds):
            books = books._moved(grouped, sums)
        return books

    def _moved(self, grouped: torch.Tensor, sums: torch.Tensor) -> GroupBooks:
        heads, groups, count, channels = self.points.shape
        total = torch.zeros(heads * groups, count, channels + 1, device=grouped.device)
        for some, span, _, scores in self._scores(grouped):
            # A product with ones and zeros: index_add is slower, and on a GPU another sum at every call.
            taken = torch.ge(scores, scores.amax(1, keepdim=True), out=scores)
            total[some] += taken @ sums[some, span]
        mass = total[..., -1:]
        moved = torch.where(mass > 0, total[..., :-1] / mass.clamp_min(1e-30), self.points.flatten(0, 1))
        return GroupBooks(moved.unflatten(0, (heads, groups)))

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, n, d] -> float32 [heads groups, n, channels]."""
        return x.float().unflatten(-1, (self.points.shape[1], -1)).transpose(1, 2).flatten(0, 1)

    def _scores(self, grouped: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """Blocks: which books, which rows, the points of these books, and scores float32 [books, points, rows] that are
        largest for the nearest point."""
        all_points = self.points.flatten(0, 1)
        # |x - p|^2 without |x|^2, which decides nothing.
        half = -0.5 * all_points.square().sum(-1, keepdim=True)
        limit = BLOCK_SCORES["cpu" if grouped.device.type == "cpu" else "cuda"]
        rows = max(1, min(BLOCK_ROWS, grouped.shape[1], limit // all_points.shape[1]))
        books = max(1, limit // (rows * all_points.shape[1]))
        for first in range(0, len(all_points), books):
            some = slice(first, first + books)
            points = all_points[some]
            for begin in range(0, grouped.shape[1], rows):
                span = slice(begin, begin + rows)
                yield some, span, points, torch.baddbmm(half[some], points, grouped[some, span].mT)


def fitted_books(
    x: torch.Tensor, weights: torch.Tensor, channels: int, points: int, rounds: int, seed: int = 0, early: int = 1
) -> GroupBooks:
    """k-means of every kv head and group, all of them together, from rows that are drawn by their weights.

    Args:
        x: float32 [heads, n, d].
        weights: [heads, n].
        channels: of a group.
        points: of a book.
        rounds: of Lloyd's algorithm.
        seed: of the draw.
        early: of the rows one in so many is looked at in the first three quarters of the rounds, or fewer of them where
            there would be less than sixteen for a point.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = weights.double().cpu() + 1e-12
    drawn = torch.multinomial(chances, points, replacement=x.shape[1] < points, generator=generator).to(x.device)
    rows = x.gather(1, drawn[..., None].expand(-1, -1, x.shape[2]))
    books = GroupBooks(rows.unflatten(-1, (-1, channels)).transpose(1, 2).contiguous())
    step = max(1, min(early, x.shape[1] // (16 * points)))
    first = 3 * rounds // 4 if step > 1 else 0
    return books.refined(x[:, ::step], weights[:, ::step], first).refined(x, weights, rounds - first)


MOST = 1 << 18
"""Groups of channels that a shared book is made from, at most."""


def shared_book(
    x: torch.Tensor, weights: torch.Tensor, channels: int, points: int, rounds: int, seed: int = 0, early: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """k-means of all kv heads and groups together, each over its length: the root of its weighted mean square.

    Args:
        x, weights, channels, points, rounds, seed, early: as of :func:`fitted_books`; an error counts as long as it is.

    Returns:
        points float32 [points, channels], and lengths [heads, groups], which they are multiplied by.
    """
    grouped, heavy = x.float().unflatten(-1, (-1, channels)), weights.float()[..., None]
    lengths = ((grouped.square().mean(-1) * heavy).sum(1) / heavy.sum(1)).sqrt().clamp_min(1e-6)
    rows = (grouped / lengths[:, None, :, None]).flatten(0, 2)
    counts = (heavy * lengths[:, None].square()).flatten()
    taken = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:MOST].to(rows.device)
    book = fitted_books(rows[taken][None], counts[taken][None], channels, points, rounds, seed, early)
    return book.points[0, 0], lengths


def rms(y: torch.Tensor) -> torch.Tensor:
    """Root mean square of every row, [..., d] -> [..., 1]."""
    return y.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)
