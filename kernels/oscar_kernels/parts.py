"""Layers that are cut between kv heads (:class:`oscar_kernels.format.CutFormat`): a cache for every part.

A kernel works on one cache. Of a layer in parts it is launched once for each, on views of the heads that the part has;
on Hopper one launch decodes two of them (:mod:`oscar_kernels.cuda.pair`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.prepared import SplitMatrix


class Part(NamedTuple):
    """What one part of a layer attends with in decode and verification, once its new tokens are stored.

    Args:
        cache: of the part.
        q_rot: [tokens, its query heads, head_dim], as its store returns them.
        lse: float32 [tokens, its query heads], takes log-sum-exps; None for nothing.
        reading: what its outputs are multiplied by; None for nothing.
    """

    cache: LayerCache
    q_rot: torch.Tensor
    lse: torch.Tensor | None = None
    reading: SplitMatrix | None = None


def split_heads(x: torch.Tensor, caches: Sequence[LayerCache], dim: int = 1) -> list[torch.Tensor]:
    """What each part of a layer has of a tensor: views.

    Args:
        x: with the kv heads of all parts in dimension ``dim``, or with as many heads for each of them.
        caches: of the parts, in the order of their heads.
        dim: of the heads.
    """
    if len(caches) == 1:
        return [x]
    heads = [cache.kv_heads for cache in caches]
    each = x.shape[dim] // sum(heads)
    return list(x.split([each * own for own in heads], dim))


def join_heads(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Tensors [tokens, heads, ...] of the parts of a layer as one; that of a single part as it is."""
    found = list(parts)
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def attend_parts(
    caches: Sequence[LayerCache],
    attend: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor],
    q: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of all heads by a kernel that takes one cache.

    Args:
        caches: of the parts, in the order of their heads.
        attend: (number of the part, its queries, float32 [tokens, its query heads] for its log-sum-exps or None).
        q: [tokens, q_heads, head_dim].
        lse: float32 [tokens, q_heads]; takes the log-sum-exps, unless None.

    Returns:
        [tokens, q_heads, head_dim].
    """
    if len(caches) == 1:
        return attend(0, q, lse)
    found = []
    for number, own in enumerate(split_heads(q, caches)):
        sums = None if lse is None else lse.new_empty(own.shape[:2])
        found.append((attend(number, own, sums), sums))
    if lse is not None:
        torch.cat([sums for _, sums in found if sums is not None], 1, out=lse)
    return torch.cat([out for out, _ in found], 1)
