"""Store of a decode step on Hopper: the launch of ``src/store.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from oscar_kernels.cache import LayerCache, StoreSlots
from oscar_kernels.codec import clip_rank
from oscar_kernels.cuda.books import has_shared_book, searched_points
from oscar_kernels.cuda.decode import arrange_reading
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import POINTER, launch, processors, struct
from oscar_kernels.cuda.together import Job, compile_together
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.prepared import PreparedLayer, PreparedSide, SplitMatrix
from oscar_kernels.scales import STEP, STRETCH

VECTORS = 16
"""Vectors of a tile: rows of a tensor-core product."""
KEPT_CHANNELS = 128
"""Channels of heads whose matrices a block keeps in registers from tile to tile."""
QUANTIZED = 3
"""Times as long as a tile of queries a block has a tile of keys or values, which are quantized too."""
SEARCHED = 8
"""Times as long it has one of keys that are looked for in codebooks of their own."""
SHARED_SEARCHED = 4
"""As many of keys that are looked for in a codebook that all share."""
_STRIDES = [("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]
_MATRIX = [("terms", POINTER), ("unscale", ctypes.c_float)]
_Side = struct("Side", [("x", POINTER), *_STRIDES, *_MATRIX, ("center", POINTER), ("rank", ctypes.c_int32),
                        ("gain", ctypes.c_float), ("rows", POINTER), ("ring", POINTER), ("sink", POINTER)])  # fmt: skip
_Queries = struct("Queries", [("x", POINTER), *_STRIDES, *_MATRIX, ("out", POINTER)])
_Points = struct("Points", [("terms", POINTER), ("factor", POINTER)])
_Slots = struct("Slots", [("row", POINTER), ("ring", POINTER), ("sink", POINTER)])


def arrange(layer: PreparedLayer) -> PreparedLayer:
    """A prepared layer whose matrices are in the order in which the lanes of this kernel and of the decode kernel read
    them.
    """
    if layer.key.codebook is not None:  # made before anything is captured
        searched_points(layer.key.codebook)
    matrix = _arranged(layer.key.matrix)
    reading = matrix if layer.key.reading is layer.key.matrix else _arranged(layer.key.reading)
    key = replace(layer.key, matrix=matrix, reading=reading)
    value = replace(layer.value, matrix=_arranged(layer.value.matrix), reading=arrange_reading(layer.value.reading))
    return PreparedLayer(key, value)


def _arranged(matrix: SplitMatrix | None) -> SplitMatrix | None:
    """A lane of warp w multiplies, for channels 32 u + 8 c + 4 e + (0..3), columns 16 w + n and 16 w + 8 + n: with
    lane = 4 n + c, terms become [set, term, w, u, e, n, c, column / 8, 2, 2], 16 bytes a lane.
    """
    if matrix is None:
        return None
    sets, count, dim, _ = matrix.terms.shape
    parts = matrix.terms.view(sets, count, dim // 32, 4, 2, 2, 2, dim // 16, 2, 8)
    ordered = parts.permute(0, 1, 7, 2, 4, 9, 3, 8, 5, 6).contiguous()
    return SplitMatrix(ordered.view(sets, count, dim, dim), matrix.scale, arranged=True)


def defines(variant: Variant, layer: PreparedLayer) -> tuple[tuple[str, int], ...]:
    """The macros that ``src/store.cu`` is compiled with for a layer."""
    return defines_of(variant, kind_of(layer))


def kind_of(layer: PreparedLayer) -> tuple[int, ...]:
    """What of a layer the kernel is compiled for: terms (0: no matrix) and matrices of keys, values and queries,
    centers, gains.
    """
    key, value = layer.key, layer.value
    counts = (0 if matrix is None else matrix.count for matrix in _matrices(layer))
    return (*counts, *_sets(layer), key.center is not None, key.gain > 0, value.gain > 0)


def _matrices(layer: PreparedLayer) -> tuple[SplitMatrix | None, SplitMatrix | None, SplitMatrix | None]:
    """Of keys, values and queries; None where they are not rotated."""
    return layer.key.matrix, layer.value.matrix, layer.key.reading


def _sets(layer: PreparedLayer) -> Iterator[int]:
    """How many matrices keys, values and queries have: one, or one per kv head."""
    return (1 if matrix is None else matrix.sets for matrix in _matrices(layer))


def defines_of(variant: Variant, kind: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    names = ("K_TERMS", "V_TERMS", "Q_TERMS", "K_SETS", "V_SETS", "Q_SETS", "HAS_CENTER", "K_FITTED", "V_FITTED")
    own = {f"OSCAR_{name}": int(value) for name, value in zip(names, kind, strict=True)}
    own |= {"OSCAR_VECTORS": VECTORS, "OSCAR_STRETCH_64THS": int(64 * STRETCH)}
    own |= {f"OSCAR_STEP_{bits}": round(1e6 * step) for bits, step in STEP.items()}
    return tuple(sorted({**dict(variant.defines()), **own}.items()))


def variant_of(cache: LayerCache, q_heads: int, page_size: int, dtype: torch.dtype) -> Variant:
    """What a cache and its queries need the kernel compiled for, a layer's matrices aside."""
    gqa = q_heads // cache.kv_heads
    return Variant(
        cache.k_layout, cache.v_layout, cache.windows, gqa, page_size, dtype, cache.k_ring.dtype,
        shared_book=has_shared_book(cache),
    )  # fmt: skip


def build(kinds: Iterable[tuple[Variant, PreparedLayer]], others: Iterable[Job] = ()) -> None:
    """:func:`prepare` for several layers, compiled at once, with ``others`` that are loaded later."""
    wanted = list(kinds)
    compile_together([*(("store.cu", defines(*kind)) for kind in wanted), *others])
    for kind in wanted:
        prepare(*kind)


def prepare(variant: Variant, layer: PreparedLayer) -> None:
    """Compile (or find in the cache) and load the kernel for a layer, so that no failure waits for the first request.

    Raises:
        KernelError: the kernel cannot be built or loaded on this machine.
    """
    _load(variant, kind_of(layer))


@cache
def _load(variant: Variant, kind: tuple[int, ...]) -> Any:
    """Compile (or find in the cache) and load the kernel: a second or two the first time.

    Raises:
        ValueError: a side is left exact, or the sides' scales have different dtypes.
    """
    if (reason := variant.unsupported_rows()) is not None:
        raise ValueError(f"the CUDA store kernel does not support {reason}")
    return load("store.cu", "oscar_store", defines_of(variant, kind), 0)


def _check(name: str, x: torch.Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    if x.shape[1:] != (heads, head_dim) or x.stride(2) != 1 or x.dtype != dtype:
        raise ValueError(f"{name} must be [tokens, {heads}, {head_dim}] of {dtype} with contiguous channels")
    if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8:
        raise ValueError(f"{name} must have heads at multiples of 16 bytes")


def store(
    cache: LayerCache,
    slots: StoreSlots,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: PreparedLayer,
    q: torch.Tensor,
    page_size: int,
    decoding: bool = False,
) -> torch.Tensor:
    """Write new tokens to the history pool, the ring and the sink store; rotate the queries in the same launch.

    Meant for decode: with many tokens a kernel with larger tiles reads the matrices less often.

    Args:
        cache: the layer's cache, written in place.
        slots: destination of every token.
        k, v, q: [tokens, heads, head_dim], bfloat16 or float16; keys and queries after RoPE. Channels contiguous, heads
            at multiples of 16 bytes.
        layer: from :func:`arrange`; without a value matrix where values come multiplied.
        page_size: tokens of a page.
        decoding: every token is the newest of a request of its own, so a decode kernel launched next may start early.

    Returns:
        the rotated queries, contiguous, in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes, row layouts or addresses do not fit, or the kernel cannot be built for this cache.
    """
    layer.check(cache)
    kv_heads = cache.kv_heads
    tokens, q_heads, head_dim = q.shape
    for name, x, heads in (("k", k, kv_heads), ("v", v, kv_heads), ("q", q, q_heads)):
        _check(name, x, heads, cache.head_dim, q.dtype)
    for matrix, heads in zip(_matrices(layer), (kv_heads, kv_heads, q_heads), strict=True):
        if matrix is not None:
            matrix.check(heads, q.dtype, arranged=True)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    variant = variant_of(cache, q_heads, page_size, q.dtype)
    kernel = _load(variant, kind_of(layer))

    def side(x: torch.Tensor, of: PreparedSide, name: str) -> ctypes.Structure:
        written = (getattr(cache, f"{name}_{part}").data_ptr() for part in ("rows", "ring", "sink"))
        at = 0 if of.center is None else of.center.data_ptr()
        rank = clip_rank(head_dim, of.clip)
        return _Side(x.data_ptr(), x.stride(0), x.stride(1), *_pointer(of.matrix), at, rank, of.gain, *written)

    at_once = processors(q.device.index or 0)
    k_sets, v_sets, q_sets = _sets(layer)
    book = layer.key.codebook
    if book is not None and not book.shared:
        k_sets = kv_heads  # tiles of keys are of one kv head
    blocks, vectors, spans = _cut(
        tokens, (kv_heads, kv_heads, q_heads), head_dim, (k_sets, v_sets, q_sets), at_once,
        (QUANTIZED if book is None else SHARED_SEARCHED if book.shared else SEARCHED, QUANTIZED, 1),
    )  # fmt: skip
    launch(
        kernel, (blocks, 1, 1), 2 * head_dim, 0,
        [side(k, layer.key, "k"), side(v, layer.value, "v"),
         _Queries(q.data_ptr(), q.stride(0), q.stride(1), *_pointer(layer.key.reading), out.data_ptr()),
         _Slots(slots.row.data_ptr(), slots.ring.data_ptr(), slots.sink.data_ptr()), ctypes.c_int32(tokens),
         ctypes.c_int32(vectors), *(ctypes.c_int32(span) for span in spans), ctypes.c_int32(decoding),
         _Points(0, 0) if book is None else _Points(searched_points(book).data_ptr(), book.factor.data_ptr())],
        overlap=True,
    )  # fmt: skip
    return out


def _pointer(matrix: SplitMatrix | None) -> tuple[int, float]:
    """Address of the terms, and what undoes their scale."""
    return (0, 1.0) if matrix is None else (matrix.terms.data_ptr(), 1.0 / matrix.scale)


@lru_cache(maxsize=4096)
def _cut(
    tokens: int, heads: tuple[int, int, int], head_dim: int, sets: tuple[int, int, int], at_once: int,
    weights: tuple[int, int, int],
) -> tuple[int, int, tuple[int, int, int]]:  # fmt: skip
    """Blocks, vectors of a tile of keys or values, and tiles of a block of keys, of values and of queries.

    Args:
        heads: of keys, values and queries.
        sets: their matrices; no block has tiles of two.
        at_once: blocks that run at once.
        weights: how long a block has a tile of each.
    """

    def blocks(vectors: int, spans: tuple[int, int, int]) -> int:
        total = 0
        for of, own, size, span in zip(heads, sets, (vectors, vectors, VECTORS), spans, strict=True):
            tiles = -(-tokens * (of // own) // size)
            total += own * -(-tiles // span)
        return total

    # Half the vectors a tile, where all tiles run at once nevertheless; where they do not, several tiles a block: more
    # of those that are done first.
    spans = 1, 1, 1
    vectors = VECTORS // 2 if blocks(VECTORS // 2, spans) <= at_once else VECTORS
    if head_dim <= KEPT_CHANNELS:
        while blocks(vectors, spans) > at_once and min(spans[:2]) * vectors < tokens * heads[0]:
            times = [span * weight for span, weight in zip(spans, weights, strict=True)]
            first, keys, values, queries = times.index(min(times)), *spans
            spans = keys + (first == 0), values + (first == 1), queries + (first == 2)
    return blocks(vectors, spans), vectors, spans
