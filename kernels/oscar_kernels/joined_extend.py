"""Prefixes and chunks in one load of the workspace, each chunk behind its prefix: one causal attention for both.

Attending to both apart and merging takes the host ten launches a layer, this takes it four, and behind a short prefix
a layer is waited for by nobody but the host. So a batch that fits is joined: always where the attention kernel splits
keys itself, elsewhere even where a longest prefix of up to ``UNCUT`` rows leaves part of the GPU idle that pieces of it
would fill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_kernels.extend_plan import QUERY_TILE, Cut, Limits, count_splits

UNCUT = 8192
"""Rows of the longest request that are never cut: on a Hopper GPU a tile of queries reads them in a tenth of a
millisecond."""


def lengths_joined(prefix_lens: Sequence[int], chunk_lens: Sequence[int]) -> list[int]:
    """Rows of every request: its prefix and its chunk; none of a request without a chunk, which nobody reads."""
    return [prefix + chunk if chunk else 0 for prefix, chunk in zip(prefix_lens, chunk_lens, strict=True)]


def is_joined(
    prefix_lens: Sequence[int], chunk_lens: Sequence[int], cut: Cut, limits: Limits, q_heads: int, processors: int
) -> bool:
    """Whether a batch is attended to at once.

    Args:
        prefix_lens: cached tokens per request.
        chunk_lens: new tokens per request.
        cut: how they would be read otherwise; a batch in which the decode kernel reads a prefix is not joined.
        limits: of the workspace.
        q_heads: query heads of this rank.
        processors: multiprocessors to fill; 1 where the attention kernel splits keys itself.

    >>> limits = Limits(capacity=4096, passes=8, break_even=32, window=0, joined=True)
    >>> one_pass = Cut([[]], [], [], [])
    >>> is_joined([2048], [128], one_pass, limits, 32, 132), is_joined([4000], [128], one_pass, limits, 32, 132)
    (True, False)
    """
    if not limits.joined or len(cut.passes) != 1 or cut.single or cut.short or cut.in_place:
        return False
    lengths = lengths_joined(prefix_lens, chunk_lens)
    if sum(lengths) > limits.capacity:
        return False
    tiles = sum(-(-chunk // QUERY_TILE) for chunk in chunk_lens)
    longest = max(lengths)
    return longest <= UNCUT or count_splits(tiles * q_heads, processors, longest) == 1


def rows_of_chunks(prefix_lens: Sequence[int], chunk_lens: Sequence[int], indptr: torch.Tensor) -> torch.Tensor:
    """Row of every token of the chunks, int64 [tokens].

    Args:
        prefix_lens, chunk_lens: as in :func:`is_joined`.
        indptr: int32 [requests + 1] on the host, running sums of :func:`lengths_joined`.

    >>> rows_of_chunks([5, 0], [2, 3], torch.tensor([0, 7, 10])).tolist()
    [5, 6, 7, 8, 9]
    """
    chunks = torch.tensor(chunk_lens)
    firsts = indptr[:-1].long() + torch.tensor(prefix_lens) - (chunks.cumsum(0) - chunks)
    return torch.arange(int(chunks.sum())) + firsts.repeat_interleave(chunks)
