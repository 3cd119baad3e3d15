"""Attention over a cache of any format inside a Hugging Face model: exact for token-by-token decoding, in one forward.

Teacher forcing fixes every token in advance, so decoding step by step and one forward over the whole sequence see the
same queries, keys and values, provided that each query reads each earlier token in the form in which the cache held it
at that step: exactly, if the token was computed in the query's own chunk or lies in a 16-bit window, else as the
quantizer gives it back. A token is quantized once, so its quantized form does not depend on who reads it, and a
:class:`Schedule` says from which position on a query reads exact keys and values. Queries of different layers meet
the consequences of the layers before, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from accuracy.layer_kinds import cached_layers
from accuracy.reach import BLOCK_SCORES, Reach, exact_attention

NAME = "cache_laboratory"

Quantizer = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, [batch, kv_heads, n, head_dim]) -> float32 of the same shape: what the cache gives back for each token.
Layers are counted among those that have a quantized cache."""


@dataclass(frozen=True)
class Schedule:
    """How a sequence of n tokens reached the cache.

    Attributes:
        chunk_starts: int64 [n]; for each token the first position of the chunk in which it was computed. A decoded
            token is a chunk of its own that is stored before it is attended to.
        decode_from: tokens from here on were decoded.
        ring_start: first position that the request's recent window may hold: the length of a prefix hit.
    """

    chunk_starts: torch.Tensor
    decode_from: int
    ring_start: int = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.chunk_starts)

    @property
    def seen(self) -> torch.Tensor:
        """int64 [n]: tokens in the cache when a token attends: all before its chunk, itself included if decoded."""
        positions = torch.arange(self.length)
        return torch.where(positions >= self.decode_from, positions + 1, self.chunk_starts)


def prefill_then_decode(length: int, prompt: int, chunk: int = 0, prefix: int = 0) -> Schedule:
    """The usual life of a request.

    Args:
        length: all tokens.
        prompt: tokens of the prompt; the rest is decoded.
        chunk: chunked-prefill size; 0 computes what is left of the prompt in one chunk.
        prefix: tokens of the prompt that come from the prefix cache, where they were computed in one chunk.

    Raises:
        ValueError: if the parts do not nest.
    """
    if not 0 <= prefix <= prompt <= length or chunk < 0:
        raise ValueError(f"need 0 <= prefix {prefix} <= prompt {prompt} <= length {length} and chunk {chunk} >= 0")
    positions = torch.arange(length)
    starts = torch.where(positions < prefix, 0, prefix)
    if chunk:
        starts = torch.where(positions < prefix, 0, prefix + (positions - prefix) // chunk * chunk)
    return Schedule(torch.where(positions < prompt, starts, positions), prompt, prefix)


def sliding_window(schedule: Schedule, recent: int) -> torch.Tensor:
    """First position of the newest tokens that each query reads exactly: int64 [n].

    As in the server: its chunk and the last ``recent`` tokens cached before it, none of them before ``ring_start``;
    a decoded token counts itself among the ``recent``, and with no window at all it reads itself quantized.
    """
    begin = (schedule.seen - recent).clamp_min(0)
    positions = torch.arange(schedule.length)
    if recent:
        floor = torch.where(positions >= schedule.ring_start, schedule.ring_start, 0)
        begin = torch.maximum(begin, floor)
    decoded = positions >= schedule.decode_from
    return torch.where(decoded, begin, torch.minimum(begin, schedule.chunk_starts))


@dataclass(frozen=True)
class Alike:
    """Sequences of a batch that begin alike: sequence i as sequence ``rows[which[i]]``, for ``first`` tokens."""

    first: int
    rows: torch.Tensor
    which: torch.Tensor


@dataclass
class CacheView:
    """What attention reads.

    Attributes:
        keys, values: quantizers; None reads everything exactly.
        sink: leading tokens that are exact.
        key_exact_from, value_exact_from: int64 [n], from :func:`sliding_window` or a method's own rule.
        observe: called with (layer, q, k, v, module) of every layer with a quantized cache; for calibration and
            measurements.
        by_token: whether what is read of a token depends on this token alone.
        alike: sequences that begin alike, whose beginning is then quantized once; None for none.
    """

    keys: Quantizer | None = None
    values: Quantizer | None = None
    sink: int = 0
    key_exact_from: torch.Tensor | None = None
    value_exact_from: torch.Tensor | None = None
    observe: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Any], None] | None = None
    by_token: bool = False
    alike: Alike | None = None

    def read(self, side: Quantizer | None, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the cache gives them back, float32."""
        if side is None:
            return x.float()
        if self.alike is None or not self.by_token:
            return side(layer, x)
        a = self.alike
        beginning = side(layer, x[a.rows, :, : a.first])[a.which]
        return torch.cat([beginning, side(layer, x[:, :, a.first :])], 2)


_view: CacheView | None = None
_ordinals: dict[int, int] = {}
"""Of the model that is read: its layers with a quantized cache, counted from 0, by their place among all."""


@contextmanager
def reading(model: Any, view: CacheView) -> Iterator[None]:
    """Let every attention layer of ``model`` read its keys and values through ``view``."""
    global _view, _ordinals
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _view = view
    _ordinals = {layer: number for number, layer in enumerate(cached_layers(model))}
    try:
        yield
    finally:
        _view = None
        model.set_attn_implementation(before)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: q [batch, q_heads, n, d], k and v [batch, kv_heads, n, d]."""
    assert _view is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = _ordinals.get(module.layer_idx)
    reach = Reach.of(module)
    if layer is None:
        wide_k, wide_v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        out = exact_attention(query, wide_k, wide_v, key.shape[2] - query.shape[2], scale, reach)
        return out.transpose(1, 2), None
    if _view.observe is not None:
        _view.observe(layer, query, key, value, module)
    out = composed_attention(layer, query, key, value, scale, _view, reach)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attend)


def first_quantized_query(view: CacheView) -> int:
    """Queries before this one read nothing quantized; n where none does."""
    assert view.key_exact_from is not None
    assert view.value_exact_from is not None
    positions = torch.arange(len(view.key_exact_from))
    reads = (torch.minimum(view.key_exact_from, positions + 1) > view.sink) | (
        torch.minimum(view.value_exact_from, positions + 1) > view.sink
    )
    found = reads.nonzero()
    return int(found[0]) if len(found) else len(positions)


def composed_attention(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    view: CacheView,
    reach: Reach = Reach(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Causal attention in which every query reads exact or quantized keys and values as ``view`` says.

    Args:
        q: [batch, q_heads, m, d], the last m of the n tokens.
        k, v: [batch, kv_heads, n, d].
        reach: of the layer.

    Returns:
        [batch, q_heads, m, d] in the dtype of ``q``.
    """
    m, n, kv_heads = q.shape[2], k.shape[2], k.shape[1]
    offset = n - m
    exact = view.keys is None and view.values is None
    begin = m if exact else min(max(first_quantized_query(view) - offset, 0), m)
    out = torch.empty_like(q)
    if begin:
        wide_k, wide_v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
        out[:, :, :begin] = exact_attention(q[:, :, :begin], wide_k, wide_v, offset, scale, reach)
    if begin == m:
        return out
    assert view.key_exact_from is not None
    assert view.value_exact_from is not None
    keys = Composed(k.float(), view.read(view.keys, layer, k), view.sink, view.key_exact_from)
    values = Composed(v.float(), view.read(view.values, layer, v), view.sink, view.value_exact_from)
    step = max(1, BLOCK_SCORES // (q.shape[0] * q.shape[1] * n))
    for start in range(begin, m, step):
        rows = slice(offset + start, offset + min(start + step, m))
        queries = q[:, :, rows.start - offset : rows.stop - offset].float() * scale
        scores = keys.scores(queries.unflatten(1, (kv_heads, -1)), rows)
        mixed = values.mixed(reach.weights(scores, rows), rows)
        out[:, :, rows.start - offset : rows.stop - offset] = mixed.flatten(1, 2).to(q.dtype)
    return out


class Composed:
    """Keys or values of one layer of which every query reads some exactly.

    Exact are the sink and what is near, so of most tokens only the coded form is looked at.

    Args:
        exact, coded: float32 [batch, kv_heads, n, d].
        sink: leading tokens that are exact.
        exact_from: int64 [n], first position that a query reads exactly, on the CPU.
    """

    def __init__(self, exact: torch.Tensor, coded: torch.Tensor, sink: int, exact_from: torch.Tensor) -> None:
        self.exact, self.coded, self.sink = exact, coded, sink
        self.least, self.exact_from = exact_from, exact_from.to(exact.device)

    def scores(self, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        """Products of queries [batch, kv_heads, group, rows, d] with all keys before the end of ``rows``, [batch,
        kv_heads, group, rows, stop]."""
        sink, near, exactly = self._parts(rows)
        flat, group = queries.flatten(2, 3), queries.shape[2]

        def products(keys: torch.Tensor) -> torch.Tensor:
            return (flat @ keys.mT).unflatten(2, (group, -1))

        found = products(self.coded[:, :, : rows.stop])
        found[..., :sink] = products(self.exact[:, :, :sink])
        part = products(self.exact[:, :, near : rows.stop])
        found[..., near:] = torch.where(exactly, part, found[..., near:])
        return found

    def mixed(self, weights: torch.Tensor, rows: slice) -> torch.Tensor:
        """Sums of values with weights [batch, kv_heads, group, rows, stop], which are overwritten: [batch, kv_heads,
        group, rows, d]."""
        sink, near, exactly = self._parts(rows)

        def sums(part: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return (part.flatten(2, 3) @ values).unflatten(2, part.shape[2:4])

        found = sums(weights[..., :sink], self.exact[:, :, :sink])
        close = weights[..., near:]
        found += sums(close.masked_fill(~exactly, 0), self.exact[:, :, near : rows.stop])
        close.masked_fill_(exactly, 0)
        weights[..., :sink] = 0
        return found.add_(sums(weights, self.coded[:, :, : rows.stop]))

    def _parts(self, rows: slice) -> tuple[int, int, torch.Tensor]:
        """End of the sink, first position that any of the queries may read exactly behind it, and whether each of them
        reads each from there on exactly, [rows, stop - first]."""
        sink = min(self.sink, rows.stop)
        near = min(max(int(self.least[rows].min()), sink), rows.stop)
        positions = torch.arange(near, rows.stop, device=self.exact.device)
        return sink, near, positions >= self.exact_from[rows, None]
