"""What no captured graph launches, once before a server answers: kernels compile at the first launch.

Graphs are captured of chunks without a prefix and of decode steps only. So the first prompt that hit the prefix cache
would wait for compilers, for seconds, and the first of all for what looks at logits. What graphs launch is here, too,
for all of it to be compiled at once (:mod:`oscar_kernels.triton.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from oscar_kernels.cache import BatchTables, StoreSlots
from oscar_kernels.extend_plan import SHORT_BATCH, Limits
from oscar_kernels.triton.rotate import MANY_VECTORS
from oscar_kernels.visible import causal_words
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.kernels import Kernels
from sglang_oscar.memory.layer import AnyLayer
from sglang_oscar.memory.logits_column import take

SHORT_CHUNK = 2
"""Tokens of a chunk that is more than one token, and that the decode kernel takes behind a long prefix."""
COUNTS = (65, 129, 257)
"""Requests from which on kernels that find their request in a batch are others, a power of two for each."""
LARGEST_CHUNK = 8192
"""Tokens of a chunk at most here, where a larger one would be another kernel's."""


@dataclass(frozen=True)
class PrefixHits:
    """Chunks behind cached prefixes that may come to a server.

    Args:
        page_size: tokens of a page.
        limits: what decides how a prefix is read; None where there is one way.
        max_batch: requests of a batch at most.
        longest: tokens of a request at most.
    """

    page_size: int
    limits: Limits | None
    max_batch: int = 1
    longest: int = 0

    def batches(self, large: int) -> Iterator[tuple[list[int], list[int]]]:
        """Lengths of prefixes and chunks, in tokens, of batches that between them need every kernel; ``large`` is a
        chunk that is rotated in larger tiles.
        """
        limits, (prefixes, chunks) = self.limits, self.kinds()
        yield prefixes, chunks
        # The chunk that is read in a pass is joined with its prefix where no other is beside it.
        yield prefixes[:1], chunks[:1]
        yield prefixes[:1], [large]
        read = SHORT_CHUNK if limits is None or not limits.short(self.page_size, SHORT_CHUNK) else chunks[0]
        for count in COUNTS:
            if count <= self.max_batch:
                yield [self.page_size] * count, [read] * count
        if limits is None:
            return

        def behind(chunk: int) -> int:
            return limits.shortest(chunk) + self.page_size

        reached = (chunk for chunk in range(SHORT_CHUNK, limits.break_even) if behind(chunk) + chunk <= self.longest)
        most = max(reached, default=0)
        # The Triton kernels of decode are others for other numbers of tokens, a power of two for each.
        for tokens in (SHORT_BATCH >> step for step in range(SHORT_BATCH.bit_length() - 1)):
            count = min(self.max_batch, tokens // SHORT_CHUNK)
            chunk = min(tokens // count, most)
            if count * chunk > tokens // 2:
                yield [behind(chunk)] * count, [chunk] * count
        if self.longest > limits.passes * limits.capacity:
            # Too much for the passes: read in place.
            yield [limits.passes * limits.capacity + self.page_size], [chunks[0]]

    def kinds(self) -> tuple[list[int], list[int]]:
        """Lengths of prefixes and chunks: a chunk that is read in a pass, a short one, and a single token."""
        limits, page = self.limits, self.page_size
        if limits is None:
            return [page], [SHORT_CHUNK]
        long = (limits.shortest(SHORT_CHUNK) if limits.break_even > SHORT_CHUNK else 0) + page
        return [page, long, page], [max(limits.break_even + 1, SHORT_CHUNK), SHORT_CHUNK, 1]


@dataclass(frozen=True)
class Dummies:
    """Runs batches in slots that belong to no request through a layer of every kind.

    Args:
        kernels: of the device that the layers are on.
        layers: one of every kind of rows.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values, bfloat16 or float16.
        sink_logits: whether the layers have them.
    """

    kernels: Kernels
    layers: Sequence[AnyLayer]
    page_size: int
    q_heads: int
    dtype: torch.dtype
    sink_logits: bool = False

    @property
    def large(self) -> int:
        """Tokens of a chunk that every layer rotates in larger tiles."""
        fewest = min(part.cache.kv_heads for layer in self.layers for part in layer.parts)
        return min(MANY_VECTORS // fewest + 1, LARGEST_CHUNK)

    def extend(self, prefixes: list[int], chunks: list[int]) -> None:
        """Attend from chunks to cached prefixes, of so many tokens, and store the chunks."""
        batch = _dummy_batch(prefixes, chunks, self.page_size, self._device)
        batch.extend_plan = self.kernels.plan_extend(batch)
        self._attend(self.kernels.extend, batch)

    def step(self, requests: int, drafts: int) -> None:
        """Decode, or verify ``drafts`` new tokens of every request where that is not 0."""
        batch = _dummy_batch([1] * requests, [max(drafts, 1)] * requests, self.page_size, self._device)
        if drafts:
            batch.visible = causal_words(drafts, self._device).repeat(requests, 1)
        self._attend(self.kernels.verify if drafts else self.kernels.decode, batch)

    @property
    def _device(self) -> torch.device:
        return self.layers[0].parts[0].cache.k_rows.device

    def _attend(self, attend: Callable[[AnyLayer, Batch, Call], torch.Tensor], batch: Batch) -> None:
        cache = self.layers[0].parts[0].cache
        kv_heads = sum(part.cache.kv_heads for part in self.layers[0].parts)
        sizes = (self.q_heads, cache.head_dim), (kv_heads, cache.head_dim), (kv_heads, cache.value_head_dim)
        q, k, v = (torch.zeros(batch.tokens, *size, dtype=self.dtype, device=self._device) for size in sizes)
        sinks = torch.zeros(self.q_heads, dtype=self.dtype, device=self._device) if self.sink_logits else None
        for layer in self.layers:
            attend(layer, batch, Call(q, k, v, batch.slots.row, 0, 1.0, sinks))


def chunks_behind_prefixes(dummies: Dummies, hits: PrefixHits) -> None:
    """Attend from a chunk of every kind to a cached prefix, and store it."""
    for prefixes, chunks in hits.batches(dummies.large):
        dummies.extend(prefixes, chunks)


def logits(dtype: torch.dtype, device: torch.device) -> None:
    """Look for NaN in a row of logits, which are of ``dtype`` or float32."""
    for numbers in {dtype, torch.float32}:
        take(torch.zeros(1, 1, dtype=numbers, device=device), 1)


def captured(dummies: Dummies, steps: Iterable[int], drafts: int = 0) -> None:
    """What graphs are captured of, all but a step's tables: chunks without a prefix, and steps of decode or
    verification. For :func:`oscar_kernels.triton.ahead.compiling`: capturing launches it all itself.

    Args:
        dummies: launch it.
        steps: requests of each step.
        drafts: new tokens of a request that are verified at once; 0 for decode.
    """
    for tokens in (SHORT_CHUNK, dummies.large):
        dummies.extend([0], [tokens])
    for requests in steps:
        dummies.step(requests, drafts)


def _dummy_batch(prefixes: list[int], chunks: list[int], page_size: int, device: torch.device) -> Batch:
    """Requests whose every page, ring and sink block is number 0, which is nobody's."""
    zeros = torch.zeros(len(chunks), dtype=torch.int32, device=device)
    pages = torch.zeros(len(chunks), max(prefixes) // page_size + 1, dtype=torch.int32, device=device)
    lens = torch.tensor(prefixes, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0).int().to(device)
    tokens = sum(chunks)
    nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    rows = torch.arange(tokens, device=device) % page_size
    tables = BatchTables(page_size, pages, lens, zeros, zeros, zeros)
    return Batch(tables, StoreSlots(rows, nowhere, nowhere), chunks, starts, prefixes)
