"""What attention reads: the tensors of one layer's cache and the tables of one batch.

Every token has its quantized row in the *history pool*. Two BF16 window buffers overlay it, both in the rotated
basis: the *sink store* with the first ``sink`` tokens of a request and the *recent ring* with its last ``recent``
ones. :func:`split_positions` says which of the three a position is read from; every kernel follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.layout import CODEBOOK, RowLayout


@dataclass(frozen=True)
class Windows:
    """Sizes, in tokens, of the 16-bit windows; 0 turns a window off.

    ``ring`` is the number of ring rows a request owns: ``recent``, and as many more as a request has new tokens at once
    where some of them may be rejected. A rejected token is one that the next step overwrites; with fewer rows it would
    have taken the place of one that is still read.
    ``max_splits`` bounds the programs that read the windows of one request during decode; each window in use takes
    one at least.
    """

    sink: int
    recent: int
    ring: int
    max_splits: int = 8

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0 or self.ring < self.recent or self.max_splits < 1:
            raise ValueError(f"need sink >= 0, ring >= recent >= 0 and max_splits >= 1, got {self}")


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache.

    Shapes: k_rows, v_rows uint8 [slots, row_bytes]; k_sink, v_sink [sink_blocks, sink, kv_heads, head_dim];
    k_ring, v_ring [requests, ring, kv_heads, head_dim], head_dim of keys or of values. Sink and ring are bfloat16 or
    float16 and hold rotated vectors. Slot ``page * page_size + i`` is token ``i`` of a page; ``k_layout`` and
    ``v_layout`` say what is in it, and ``k_codebook``, on the same device, what keys of that coding stand for.

    Raises:
        ValueError: keys and values have other numbers of heads, or values a codebook.
    """

    k_layout: RowLayout
    v_layout: RowLayout
    windows: Windows
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    k_sink: torch.Tensor
    v_sink: torch.Tensor
    k_ring: torch.Tensor
    v_ring: torch.Tensor
    k_codebook: Codebook | None = None

    def __post_init__(self) -> None:
        if self.k_layout.kv_heads != self.v_layout.kv_heads:
            raise ValueError(f"keys and values must have as many heads, got {self.k_layout} and {self.v_layout}")
        if self.v_layout.coding == CODEBOOK:
            raise ValueError("values cannot have a codebook, only keys can")

    @property
    def kv_heads(self) -> int:
        """kv heads of this rank."""
        return self.k_layout.kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head of the keys."""
        return self.k_layout.head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels of a head of the values, and so of attention's output."""
        return self.v_layout.head_dim

    @property
    def exact(self) -> bool:
        """Whether keys or values are left exact."""
        return self.k_layout.exact or self.v_layout.exact

    @property
    def scale_dtype(self) -> torch.dtype:
        """dtype of scales and zero points, for kernels that read both sides alike; bfloat16 where no side has any.

        Raises:
            ValueError: keys and values have different ones.
        """
        coded = [layout.scale_dtype for layout in (self.k_layout, self.v_layout) if not layout.exact]
        if len(set(coded)) > 1:
            raise ValueError(f"this kernel reads scales of one dtype, got {coded[0]} of keys and {coded[1]} of values")
        return coded[0] if coded else torch.bfloat16

    @property
    def exact_dtype(self) -> torch.dtype:
        """dtype of rows of 16 bits, for kernels that read both sides alike; bfloat16 where no side is left exact.

        Raises:
            ValueError: keys and values have different ones.
        """
        exact = [layout.exact_dtype for layout in (self.k_layout, self.v_layout) if layout.exact]
        if len(set(exact)) > 1:
            raise ValueError(f"this kernel reads 16 bits of one dtype, got {exact[0]} of keys and {exact[1]} of values")
        return exact[0] if exact else torch.bfloat16


def check_layouts(cache: LayerCache, key: RowLayout, value: RowLayout) -> None:
    """Refuse to write rows of one layout into a cache of another.

    Raises:
        ValueError: a layout is not that of the cache.
    """
    for name, wanted, found in (("key", key, cache.k_layout), ("value", value, cache.v_layout)):
        if wanted is not found and wanted != found:
            raise ValueError(f"the format has {name} rows of {wanted}, the cache of {found}")


def check_queries(cache: LayerCache, q_rot: torch.Tensor) -> None:
    """What every decode kernel asks of its cache and its queries [batch, q_heads, head_dim].

    Raises:
        ValueError: they do not fit each other, or channels are not contiguous.
    """
    _, q_heads, head_dim = q_rot.shape
    if head_dim != cache.head_dim or q_heads % cache.kv_heads or q_rot.stride(2) != 1:
        raise ValueError(f"queries {tuple(q_rot.shape)} do not fit {cache.kv_heads} kv heads of {cache.head_dim}")
    if cache.k_sink.dtype != cache.k_ring.dtype:
        raise ValueError("sink store and ring must have one dtype")


def check_lse(lse: torch.Tensor | None, batch: int, q_heads: int) -> None:
    """What every decode kernel asks of the tensor that takes its log-sum-exps.

    Raises:
        ValueError: it is not contiguous float32 [batch, q_heads].
    """
    if lse is not None and not (lse.shape == (batch, q_heads) and lse.dtype == torch.float32 and lse.is_contiguous()):
        raise ValueError(f"lse must be contiguous float32 [{batch}, {q_heads}]")


def check_new_tokens(windows: Windows, tokens: int) -> None:
    """What every kernel asks that attends to several new tokens of a request at once.

    Raises:
        ValueError: the ring has no room for them beside the recent window.
    """
    if windows.ring < windows.recent + tokens:
        raise ValueError(f"{tokens} new tokens at once need a ring of {windows.recent + tokens} tokens, got {windows}")


def check_visible(windows: Windows, visible: torch.Tensor, queries: int) -> None:
    """What a kernel for a GPU asks of the words of new tokens (:mod:`oscar_kernels.visible`), of which ``queries`` ask.

    Raises:
        ValueError: the ring is too small, or the words are not contiguous int64 [batch, tokens], one per query.
    """
    check_new_tokens(windows, visible.shape[1])
    if visible.dtype != torch.int64 or not visible.is_contiguous() or queries != visible.numel():
        raise ValueError(f"visible must be contiguous int64 with an entry for each of {queries} tokens")


@dataclass(frozen=True)
class BatchTables:
    """Where the tokens of each request of a batch are.

    Shapes: page_table int32 [batch, max_pages], page numbers in order of position; kv_lens int32 [batch], tokens
    cached for the request, in verification before its new ones; ring_row, ring_start, sink_block int32 [batch].
    ``ring_start`` is the first position that the request's ring row holds: what lies before it belongs to an earlier
    owner of the row.
    """

    page_size: int
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    ring_row: torch.Tensor
    ring_start: torch.Tensor
    sink_block: torch.Tensor


@dataclass(frozen=True)
class StoreSlots:
    """Where each new token goes; -1 in ring or sink means "not there".

    Shapes: row int64 [tokens], slot in the history pool; ring int64 [tokens], ``ring_row * ring + position % ring``;
    sink int64 [tokens], ``sink_block * sink + position``. The caller keeps ring slots unique within one store.
    """

    row: torch.Tensor
    ring: torch.Tensor
    sink: torch.Tensor


@dataclass(frozen=True)
class Copies:
    """Where keys and values of new tokens go beside the cache, in its basis and in 16 bits.

    Shapes: k and v [rows, kv_heads, head_dim], heads contiguous and rows as many heads apart; rows int64 [tokens], -1
    for a token that goes nowhere.
    """

    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor

    def check(self, tokens: int, cache: LayerCache) -> None:
        """Refuse copies of other vectors.

        Raises:
            ValueError: shapes or strides do not fit.
        """
        check_16_bit_rows(self.k, self.v, cache)
        if self.rows.shape != (tokens,) or self.rows.dtype != torch.int64:
            raise ValueError(f"rows of copies must be int64 [{tokens}]")


def check_16_bit_rows(k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> None:
    """What a kernel asks that writes keys and values in 16 bits: a row may have further heads, of other parts.

    Raises:
        ValueError: they are not [rows, kv_heads, head_dim] with contiguous heads, rows of both as many heads apart.
    """
    for name, x, head_dim in (("k", k, cache.head_dim), ("v", v, cache.value_head_dim)):
        if (
            x.shape[1:] != (cache.kv_heads, head_dim)
            or x.stride()[1:] != (head_dim, 1)
            or x.stride(0) * cache.head_dim != k.stride(0) * head_dim
            or x.stride(0) % head_dim
        ):
            raise ValueError(f"rows of {name} must be [rows, {cache.kv_heads}, {head_dim}] with contiguous heads")


@dataclass(frozen=True)
class Chunks:
    """New tokens of prompts, a chunk per request, one after the other.

    Shapes: q [tokens, q_heads, head_dim], not rotated; k and v [tokens, kv_heads, head_dim], k not rotated, v in the
    basis of the cached values and with heads of its own size. starts is int32 [batch + 1] on the device: the first
    token of every chunk, then the number of tokens; a chunk may be empty. Channels are contiguous; tokens and heads may
    have any stride.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> Chunks:
        """Chunks of these numbers of tokens."""
        return cls(q, k, v, torch.tensor([0, *lengths]).cumsum(0).int().to(q.device))


def split_positions(kv_len: int, ring_start: int, windows: Windows) -> tuple[int, int]:
    """Borders between sink store, history pool and recent ring for a request of ``kv_len`` cached tokens.

    Returns:
        (sink_end, ring_begin): positions [0, sink_end) are read from the sink store, [sink_end, ring_begin) from
        the history pool and [ring_begin, kv_len) from the ring.

    >>> split_positions(1000, 0, Windows(sink=64, recent=256, ring=256))
    (64, 744)
    >>> split_positions(1000, 900, Windows(sink=64, recent=256, ring=256))
    (64, 900)
    >>> split_positions(40, 0, Windows(sink=64, recent=256, ring=256))
    (40, 40)
    """
    sink_end = min(windows.sink, kv_len)
    ring_begin = kv_len if windows.recent == 0 else max(kv_len - windows.recent, ring_start)
    return sink_end, min(max(ring_begin, sink_end), kv_len)
