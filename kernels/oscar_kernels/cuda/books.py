"""Codebooks of keys in the order in which the CUDA kernels read them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from oscar_kernels.codebook import GROUP, POINTS, Codebook

_arranged: WeakKeyDictionary[Codebook, torch.Tensor] = WeakKeyDictionary()
_searched: WeakKeyDictionary[Codebook, torch.Tensor] = WeakKeyDictionary()


def book_bytes(head_dim: int) -> int:
    """Bytes of a kv head's codebook in shared memory: its points, and a float32 factor of every four channels."""
    return head_dim * POINTS + head_dim


def arranged_book(book: Codebook) -> torch.Tensor:
    """A codebook as the decode kernel copies it, made once: uint8 [kv_heads, bytes], on its device.

    Lane c of four looks up groups 16 w + 4 c + j. Points are [w, j, point, c, 4], factors in order behind them.
    """
    found = _arranged.get(book)
    if found is None:
        points = book.points.unflatten(1, (-1, 4, GROUP)).permute(0, 1, 3, 4, 2, 5).contiguous()
        parts = [x.flatten(1).view(torch.uint8) for x in (points, book.factor.contiguous())]
        found = _arranged[book] = torch.cat(parts, 1).contiguous()
    return found


def searched_points(book: Codebook) -> torch.Tensor:
    """Points as the store kernel compares them, made once: bfloat16 [kv_heads, head_dim // 4, 256, 8], on its device.

    The four whole numbers of a point, and three that sum to half of their squares.
    """
    found = _searched.get(book)
    if found is None:
        rest = book.points.double().square().sum(-1, keepdim=True) / 2
        parts = [book.points.bfloat16()]
        for _ in range(3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].double()
        parts.append(torch.zeros_like(parts[-1]))
        found = _searched[book] = torch.cat(parts, -1).contiguous()
    return found
