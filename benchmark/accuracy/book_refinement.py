"""Points of key books moved on what attention loses, from where k-means has put them.

k-means makes the squared error of rows small, each weighed once. Here the KL of attention over calibration requests is
made small by its gradient: which point is nearest stays fixed within a step (straight through), scales too. A kv head
keeps its moved points only if they lose less on requests that they were not moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from accuracy.codebooks import read_rows
from oscar_rotation.fit.held_out import Request
from oscar_rotation.math.attention_weights import attention_kl
from oscar_rotation.math.group_books import GroupBooks

EPOCHS, RATE, QUERIES = 4, 3e-3, 512
"""Times that every request is looked at; step of Adam, in root mean squares of a row; queries of a request, its last
ones."""

Map = Callable[[torch.Tensor], torch.Tensor]
"""[1, kv_heads, n, d] to the same shape."""


def refined(
    books: GroupBooks, fitted: Sequence[Request], held_out: Sequence[Request], into: Map, out: Map, gain: float
) -> GroupBooks:
    """Books of a layer, moved where that helps.

    Args:
        books: from k-means.
        fitted: requests to move points on.
        held_out: requests to compare on.
        into, out: the transform of keys, and back.
        gain: as of :func:`accuracy.codebooks.read_rows`.
    """
    points = books.points.clone().requires_grad_()
    optimizer = torch.optim.Adam([points], RATE)
    for step in range(EPOCHS * len(fitted)):
        request = fitted[step % len(fitted)]
        with torch.enable_grad():
            optimizer.zero_grad()
            _loss(GroupBooks(points), request, into, out, gain, QUERIES).sum().backward()
        optimizer.step()
    moved = GroupBooks(points.detach())
    before, after = (
        torch.stack([_loss(x, request, into, out, gain, QUERIES) for request in held_out]).mean(0)
        for x in (books, moved)
    )
    return GroupBooks(torch.where((after < before)[:, None, None, None], moved.points, books.points))


def _loss(books: GroupBooks, request: Request, into: Map, out: Map, gain: float, queries: int) -> torch.Tensor:
    """KL of attention by kv head, [kv_heads]."""
    scale = request.k.shape[-1] ** -0.5
    read = out(read_rows(into(request.k[None]), books, gain))[0]
    return attention_kl(request.q, request.k, read, scale, queries)
