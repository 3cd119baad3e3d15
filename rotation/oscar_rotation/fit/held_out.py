"""Requests that a fit does not learn from: what is to be chosen is chosen by the attention on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from oscar_rotation.dump import DumpChunk, DumpError, DumpReader
from oscar_rotation.fit.samples import plan_samples
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rotary_center import turned

HELD_OUT_TOKENS = 8192
"""Tokens that are held out, from the end of a dump; a quarter of it at most."""

QUERIES = 128
"""Of every held-out request, the last ones, whose attention is compared."""


@dataclass(frozen=True)
class Request:
    """One request of one layer by kv head.

    Attributes:
        q: float32 [kv_heads, n, group, head_dim], after RoPE.
        k, v: float32 [kv_heads, n, head_dim].
        sinks: float32 [kv_heads, group], sink logits of the layer; None for a layer without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


def plan_held_out(dump: DumpReader, chunks: Sequence[int], why: str) -> dict[int, int]:
    """Which requests of a dump are held out: chunk -> its first one.

    Args:
        dump: the dump.
        chunks: of it, that are used.
        why: what needs them, for the message.

    Raises:
        DumpError: it holds one request.
    """
    held = plan_samples({chunk: dump.seq_lens(0, chunk) for chunk in chunks}, HELD_OUT_TOKENS)
    if not held:
        raise DumpError(f"{dump.root}: holds one request; {why} needs two or more, one to choose on; dump more")
    return held


def requests(chunk: DumpChunk, sinks: torch.Tensor | None = None) -> Iterator[Request]:
    """Every request of a chunk.

    Args:
        chunk: of a layer.
        sinks: [q_heads], sink logits of the layer; None for a layer without.
    """
    heads = chunk.k.shape[1]
    by_head = None if sinks is None else sinks.float().to(chunk.q.device).view(heads, -1)
    if not chunk.seq_lens:
        return
    parts = (x.split(list(chunk.seq_lens)) for x in (chunk.q, chunk.k, chunk.v))
    for q, k, v in zip(*parts, strict=True):
        queries = q.unflatten(1, (heads, -1)).transpose(0, 1).float().contiguous()
        keys, values = (x.transpose(0, 1).float().contiguous() for x in (k, v))
        yield Request(queries, keys, values, by_head)


def held_out_requests(dump: DumpReader, layer: int, held: Mapping[int, int], device: torch.device) -> list[Request]:
    """The held-out requests of a layer, on a device.

    Raises:
        DumpError: as :meth:`oscar_rotation.dump.DumpReader.load`.
    """
    found: list[Request] = []
    sinks = dump.sink_logits(layer)
    for chunk, first in held.items():
        _, later = dump.load(layer, chunk).to(device).split(first)
        found += requests(later, sinks)
    return found


def moved(held_out: Sequence[Request], positions: Positions | None) -> list[Request]:
    """Requests at other places of a context, spread evenly over it: their attention is the same."""
    if positions is None:
        return list(held_out)
    longest = max((request.k.shape[1] for request in held_out), default=0)
    out = []
    for offset, request in zip(positions.offsets(longest, len(held_out)), held_out, strict=True):
        cos, sin = (table[0].float().to(request.k.device) for table in positions.tables(offset[None]))
        out.append(replace(request, q=turned(request.q, cos, sin), k=turned(request.k, cos, sin)))
    return out
