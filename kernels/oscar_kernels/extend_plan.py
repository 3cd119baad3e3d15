"""Who attends to what in an extend that goes through a workspace: decided once per forward pass, on the host.

Prefixes are laid one after the other and cut where the workspace is full; each load of it is a *pass*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oscar_kernels.cache import BatchTables, LayerCache
from oscar_kernels.spans import Spans

SHORT_BATCH = 256
"""Tokens of short chunks that the decode kernel takes at a time."""
MOST_SHORT = 1024
"""Tokens of short chunks per forward pass: each needs a row of the page table."""
MAX_SPLITS = 8
"""Most pieces that the keys of a pass are cut into."""
MIN_PIECE = 1024
"""Fewest keys of the longest piece of a cut pass."""
QUERY_TILE = 128
"""Queries of one head that FlashInfer's FA3 kernel gives to one block."""
INT_WORKSPACE_BYTES = 8 << 20
"""What FlashInfer allocates per wrapper for its plan."""


class Ragged(Protocol):
    """The part of FlashInfer's BatchPrefillWithRaggedKVCacheWrapper that is used here."""

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, **options: Any,
    ) -> None:  # fmt: skip
        """Decide who works on what; index tensors on the host."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any) -> torch.Tensor:
        """[tokens, q_heads, head_dim]."""

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same and float32 [tokens, q_heads], the log2 of the sum of exp2 of the logits (times log2 e)."""


class Decode(Protocol):
    """One query per request on its ``kv_lens`` cached tokens; see :func:`oscar_kernels.triton.decode.decode`."""

    def __call__(
        self,
        cache: LayerCache,
        tables: BatchTables,
        q_rot: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Span:
    """Positions [begin, end) of a request's prefix."""

    request: int
    begin: int
    end: int


@dataclass(frozen=True)
class Limits:
    """What decides how a prefix is read.

    Args:
        capacity: tokens of prefixes that the workspace holds.
        passes: loads of it per layer at most.
        break_even: dequantizing a long prefix takes as long as the decode kernel takes to read it for so many tokens.
        window: tokens of history that have as many bytes as the 16-bit windows of a request.
        joined: whether prefixes and chunks that the workspace holds are attended to at once
            (:mod:`oscar_kernels.joined_extend`).
    """

    capacity: int
    passes: int
    break_even: int
    window: int
    joined: bool = False

    def short(self, prefix: int, chunk: int) -> bool:
        """Whether the decode kernel reads a prefix sooner, once for every token of the chunk, than it is dequantized.

        >>> limits = Limits(capacity=65536, passes=8, break_even=32, window=2240)
        >>> limits.short(100_000, 31), limits.short(8192, 25), limits.short(512, 6), limits.short(320, 5)
        (True, True, False, False)
        """
        return chunk * (prefix + self.window) <= self.break_even * prefix

    def shortest(self, chunk: int) -> int:
        """Tokens of a prefix from which on a chunk of fewer than ``break_even`` is :meth:`short`.

        >>> Limits(capacity=65536, passes=8, break_even=32, window=2240).shortest(5)
        415
        """
        return -(-chunk * self.window // (self.break_even - chunk))


@dataclass(frozen=True)
class Cut:
    """Requests by how their prefix is read; those without a chunk or a prefix are in none.

    ``passes`` are the spans of every pass, in order of request and position; ``single`` have one token and ``short``
    have few, up to MOST_SHORT together; ``in_place`` is too much for the passes.
    """

    passes: list[list[Span]]
    single: list[int]
    short: list[int]
    in_place: list[int]


def cut_prefixes(prefix_lens: list[int], chunk_lens: list[int], limits: Limits) -> Cut:
    """Which spans of which prefixes go through the workspace together, and which do not.

    Args:
        prefix_lens: cached tokens per request.
        chunk_lens: new tokens per request.
        limits: of the workspace.

    >>> cut = cut_prefixes([0, 300, 50], [64, 64, 1], Limits(256, 8, 32, 2240))
    >>> [[(span.begin, span.end) for span in load] for load in cut.passes], cut.single
    ([[(0, 256)], [(256, 300)]], [2])
    """
    cut = Cut([], [], [], [])
    room = limits.passes * limits.capacity
    short_room = MOST_SHORT
    free = 0
    for request, (prefix, chunk) in enumerate(zip(prefix_lens, chunk_lens, strict=True)):
        if prefix == 0 or chunk == 0:
            continue
        if chunk == 1:
            cut.single.append(request)
        elif chunk <= short_room and limits.short(prefix, chunk):
            cut.short.append(request)
            short_room -= chunk
        elif prefix > room:
            cut.in_place.append(request)
        else:
            room -= prefix
            begin = 0
            while begin < prefix:
                if free == 0:
                    cut.passes.append([])
                    free = limits.capacity
                end = min(prefix, begin + free)
                cut.passes[-1].append(Span(request, begin, end))
                free -= end - begin
                begin = end
    return cut


def count_splits(works: int, processors: int, longest: int) -> int:
    """Pieces to cut the keys of a pass into, so that few queries on many keys fill the GPU.

    Args:
        works: blocks that the attention kernel has, of a tile of queries and a head each.
        processors: multiprocessors to fill.
        longest: keys of the longest span.

    >>> count_splits(works=64, processors=132, longest=32768), count_splits(works=512, processors=132, longest=32768)
    (2, 1)
    """
    best, waves = 1, float(-(-works // processors))
    for splits in range(2, min(MAX_SPLITS, longest // MIN_PIECE) + 1):
        # Pieces have to be merged: only a clear gain counts.
        if -(-works * splits // processors) / splits < 0.9 * waves:
            best, waves = splits, -(-works * splits // processors) / splits
    return best


def cut_spans(spans: list[Span], splits: int) -> list[Span]:
    """The first piece of every span, then the second, and so on.

    >>> [(span.request, span.begin, span.end) for span in cut_spans([Span(0, 0, 9), Span(3, 4, 6)], 2)]
    [(0, 0, 4), (3, 4, 5), (0, 4, 9), (3, 5, 6)]
    """
    pieces = []
    for piece in range(splits):
        for span in spans:
            size = span.end - span.begin
            ends = (span.begin + size * edge // splits for edge in (piece, piece + 1))
            pieces.append(Span(span.request, *ends))
    return pieces


@dataclass(frozen=True)
class Pass:
    """One load of the workspace: spans, and the slice of query tokens that attend to them.

    Keys are cut into ``splits`` pieces; the queries are repeated as often, one copy for each piece.
    """

    attention: Ragged
    spans: Spans
    rows: int
    tokens: slice
    splits: int


@dataclass(frozen=True)
class Short:
    """Tokens of short chunks, each a request of its own to the decode kernel: attention to prefixes only.

    ``tokens`` int64 says where their queries are, ``tables`` what is cached of their requests.
    """

    tokens: torch.Tensor
    tables: BatchTables


@dataclass(frozen=True)
class Decoding:
    """Chunks of one token on a prefix: requests that decode within a mixed batch.

    ``tokens`` int64 says where their queries are, ``tables`` where their caches are once the token is stored.
    """

    tokens: torch.Tensor
    tables: BatchTables


@dataclass(frozen=True)
class Joined:
    """Where prefixes and chunks lie that are attended to at once (:mod:`oscar_kernels.joined_extend`), on the device.

    ``spans`` are all requests of the batch from their first position on, with room for their chunks in the ``rows``;
    ``chunk_rows`` int64 [tokens] is the row of every token of the chunks.
    """

    spans: Spans
    chunk_rows: torch.Tensor
    rows: int


@dataclass(frozen=True)
class ExtendPlan:
    """What every layer of a forward pass does.

    ``in_place`` is the batch's tables with a length of 0 for every request whose prefix is read in another way; None
    where no prefix is read in place. ``decoding`` is left to the caller, who stores before it decodes. Where there is
    ``joined``, it is all there is.
    """

    tokens: int
    passes: list[Pass]
    short: list[Short]
    in_place: BatchTables | None
    decoding: Decoding | None
    joined: Joined | None = None

    @property
    def has_prefix(self) -> bool:
        """Whether anything is attended to but the chunks: only then are rotated queries needed."""
        others = (self.in_place, self.decoding, self.joined)
        return bool(self.passes or self.short) or any(other is not None for other in others)
