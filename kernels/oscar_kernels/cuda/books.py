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
"""Numbers of 16 bits that the store kernel compares for a point."""


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
    points = POINTS if book.shared else book.points[..., 0].numel()
    return book_bytes(book.kv_heads, book.head_dim, book.shared) + points * SEARCHED * 2


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
    """Points as the store kernel compares them, made once: bfloat16 [kv_heads, head_dim // 4, 256, 8], or [256, 8]
    where all are the same, on its device.

    The four whole numbers of a point, and three that sum to half of their squares.
    """
    found = _searched.get(book)
    if found is None:
        points = book.points[0, 0] if book.shared else book.points
        rest = points.double().square().sum(-1, keepdim=True) / 2
        parts = [points.bfloat16()]
        for _ in range(3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].double()
        parts.append(torch.zeros_like(parts[-1]))
        found = _searched[book] = torch.cat(parts, -1).contiguous()
    return found
