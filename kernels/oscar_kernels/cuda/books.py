"""Codebooks of keys in the order in which the CUDA kernels read them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.codebook import GROUP, POINTS, Codebook

_arranged: WeakKeyDictionary[Codebook, torch.Tensor] = WeakKeyDictionary()
_searched: WeakKeyDictionary[Codebook, torch.Tensor] = WeakKeyDictionary()

LANES = 32
SEARCHED = 8
"""Numbers of 16 bits that the store kernel compares for a point of a book that is not shared."""
CHUNK = 8
"""Points of a shared book that the store kernel compares twice."""
CHUNK_GAP = 8
"""Numbers of 16 bits between them, so that they begin at different banks."""
DEPTH = 16
"""Of the store kernel's products with a shared book."""


def book_bytes(kv_heads: int, head_dim: int, shared: bool) -> int:
    """Bytes of a codebook in shared memory: points, and a float32 factor of every four channels of a kv head.

    Args:
        kv_heads: heads that have points.
        head_dim: channels of a head.
        shared: all have the same.
    """
    points = LANES * POINTS * GROUP if shared else kv_heads * head_dim * POINTS
    return points + kv_heads * head_dim


def copies_bytes(book: Codebook) -> int:
    """Bytes of what :func:`arranged_book` and :func:`searched_points` make of a codebook."""
    points = book.points[..., 0].numel()
    searched = POINTS * DEPTH + POINTS // CHUNK * (CHUNK * GROUP + CHUNK_GAP) if book.shared else points * SEARCHED
    return book_bytes(book.kv_heads, book.head_dim, book.shared) + 2 * searched


def has_shared_book(cache: LayerCache) -> bool:
    """Whether all kv heads and groups of a layer's keys have the same points."""
    return cache.k_codebook is not None and cache.k_codebook.shared


def arranged_book(book: Codebook) -> torch.Tensor:
    """A codebook as the decode kernel copies it, made once: uint8 [bytes], on its device.

    Lane c of four looks up groups 16 w + 4 c + j. Points are [kv_head, w, j, point, c, 4], or [point, lane, 4] where
    all are the same, factors in order behind them.
    """
    found = _arranged.get(book)
    if found is None:
        if book.shared:
            points = book.points[0, 0, :, None].expand(-1, LANES, -1)
        else:
            points = book.points.unflatten(1, (-1, 4, GROUP)).permute(0, 1, 3, 4, 2, 5)
        parts = [x.flatten().view(torch.uint8) for x in (points.contiguous(), book.factor)]
        found = _arranged[book] = torch.cat(parts).contiguous()
    return found


def searched_points(book: Codebook) -> torch.Tensor:
    """Points as the store kernel compares them, made once, on their device.

    Returns:
        bfloat16 [kv_heads, head_dim // 4, 256, 8]: the four whole numbers of a point, and three that sum to half of
        their squares. Of a shared book float16 [numbers]: the operands of products as lanes take them, and points in
        order, with a gap behind every eight.
    """
    found = _searched.get(book)
    if found is None:
        found = _searched[book] = (_operands if book.shared else _halved)(book).contiguous()
    return found


def _halved(book: Codebook) -> torch.Tensor:
    rest = book.points.double().square().sum(-1, keepdim=True) / 2
    parts = [book.points.bfloat16()]
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].double()
    parts.append(torch.zeros_like(parts[-1]))
    return torch.cat(parts, -1)


def _operands(book: Codebook) -> torch.Tensor:
    """A product's eight columns are points 64 c + 2 t and the next for c of 0 to 3, t its number: lane c of a row of
    scores sees 64 neighbouring points. Lane 4 n + c has of column n numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of its
    depth: the point negated, twice, and the bytes of its square.
    """
    points = book.points[0, 0].half()
    square = book.points[0, 0].int().square().sum(-1)
    depth = torch.zeros(POINTS, DEPTH, dtype=torch.float16, device=points.device)
    depth[:, :8] = -torch.cat([points, points], -1)
    depth[:, 8], depth[:, 9] = square >> 8, square & 255
    # [lane of a row of scores, pair of products, product, column of the lane, half of the depth, lane of a column, 2]
    parts = depth.view(4, 16, 2, 2, 2, 4, 2).permute(1, 0, 3, 5, 2, 4, 6)
    gap = torch.zeros(POINTS // CHUNK, CHUNK_GAP, dtype=torch.float16, device=points.device)
    chunks = torch.cat([points.view(POINTS // CHUNK, -1), gap], -1)
    return torch.cat([parts.flatten(), chunks.flatten()])
