"""Store of a prompt's chunk on Hopper: the launch of ``src/prompt.cu``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache as cached
from functools import lru_cache
from typing import Any

import torch

from oscar_kernels.cache import Copies, LayerCache, StoreSlots
from oscar_kernels.codec import clip_rank
from oscar_kernels.cuda import store as step
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import POINTER, launch, processors, struct
from oscar_kernels.cuda.together import Job
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.layout import AFFINE
from oscar_kernels.prepared import PreparedLayer, PreparedSide, SplitMatrix

SOURCE = "prompt.cu"
HEAD_DIM = 128
TILE = 64
"""Vectors of a tile: rows of a tensor-core product of four warps."""
TEAMS = 4
"""Groups of four warps of a block, each with tiles of its own: as many as there are registers for."""
QUERIES = 0.5
"""How long a block has a tile of queries, relative to one of keys or values, which are quantized too."""
_Input = struct("Input", [("x", POINTER), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64),
                          ("terms", POINTER), ("unscale", ctypes.c_float)])  # fmt: skip
_Side = struct("Side", [("input", _Input), ("center", POINTER), ("rank", ctypes.c_int32), ("gain", ctypes.c_float),
                        ("rows", POINTER), ("ring", POINTER), ("sink", POINTER), ("copy", POINTER)])  # fmt: skip
_Queries = struct("Queries", [("input", _Input), ("out", POINTER)])
_Slots = struct("Slots", [("row", POINTER), ("ring", POINTER), ("sink", POINTER), ("copy", POINTER),
                          ("copy_heads", ctypes.c_int32)])  # fmt: skip


@dataclass(frozen=True, eq=False)
class PromptLayer:
    """A layer's transforms, and the terms of their matrices in the order in which this kernel reads them.

    Args:
        plain: as :func:`oscar_kernels.prepared.prepare` makes them.
        key, value, reading: of keys, of values and of queries, shaped as before; None where they are not rotated.
        q_heads: query heads.
        page_size: tokens of a page.
    """

    plain: PreparedLayer
    key: torch.Tensor | None
    value: torch.Tensor | None
    reading: torch.Tensor | None
    q_heads: int
    page_size: int


def arrange(layer: PreparedLayer, q_heads: int, page_size: int) -> PromptLayer:
    """A prepared layer as this kernel takes it."""
    matrix = _arranged(layer.key.matrix)
    reading = matrix if layer.key.reading is layer.key.matrix else _arranged(layer.key.reading)
    return PromptLayer(layer, matrix, _arranged(layer.value.matrix), reading, q_heads, page_size)


def _arranged(matrix: SplitMatrix | None) -> torch.Tensor | None:
    """Terms in the order of shared memory: [u, h, row / 8, p, j, c, column % 2, c, row % 2].

    Lane c of four brings channels 32 u + 8 c + 4 h + (0..3) as rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of a product of
    depth 16; its columns 32 p + 8 j + 2 c + (0, 1) are channels 32 p + 8 c + 2 j + (0, 1).
    """
    if matrix is None:
        return None
    sets, count, dim, _ = matrix.terms.shape
    parts = matrix.terms.view(sets, count, dim // 32, 4, 2, 2, 2, dim // 32, 4, 4, 2)
    return parts.permute(0, 1, 2, 4, 5, 7, 9, 8, 10, 3, 6).contiguous().view(matrix.terms.shape)


def unsupported(cache: LayerCache) -> str | None:
    """What of a cache's rows this kernel does not write, or None."""
    layouts = cache.k_layout, cache.v_layout
    reasons = (
        (cache.exact or any(layout.coding != AFFINE for layout in layouts), "rows without zero points"),
        (any(layout.head_dim != HEAD_DIM for layout in layouts), f"heads of other than {HEAD_DIM} channels"),
        (len({layout.scale_dtype for layout in layouts}) > 1, "keys and values with scales of different dtypes"),
    )
    return next((reason for holds, reason in reasons if holds), None)


Kind = tuple[Variant, tuple[int, ...]]
"""What the kernel is compiled for: rows, windows and dtypes, and how a layer is transformed."""


def kind_of(cache: LayerCache, layer: PromptLayer, dtype: torch.dtype) -> Kind:
    """What a layer and its cache need the kernel compiled for, with keys and values of ``dtype``."""
    return step.variant_of(cache, layer.q_heads, layer.page_size, dtype), step.kind_of(layer.plain)


def job(kind: Kind) -> Job:
    """What is compiled for it."""
    return SOURCE, _defines_of(*kind)


def prepare(kind: Kind) -> None:
    """Compile (or find in the cache) and load the kernel, so that no failure waits for the first request.

    Raises:
        KernelError: the kernel cannot be built or loaded on this machine.
    """
    _load(*kind)


def defines(variant: Variant, layer: PreparedLayer) -> tuple[tuple[str, int], ...]:
    """The macros that ``src/prompt.cu`` is compiled with for a layer."""
    return _defines_of(variant, step.kind_of(layer))


def _defines_of(variant: Variant, kind: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    own = {"OSCAR_PROMPT_THREADS": 128 * TEAMS, "OSCAR_PROMPT_BYTES": _shared_bytes(kind)}
    return tuple(sorted({**dict(step.defines_of(variant, kind)), **own}.items()))


def _shared_bytes(kind: tuple[int, ...]) -> int:
    """Dynamic shared memory of a block: the terms of a matrix, and the barrier that says when they are there."""
    return max(kind[:3]) * HEAD_DIM * HEAD_DIM * 2 + 16


@cached
def _load(variant: Variant, kind: tuple[int, ...]) -> Any:
    return load(SOURCE, "oscar_prompt", _defines_of(variant, kind), _shared_bytes(kind))


def fits(*vectors: torch.Tensor) -> bool:
    """Whether vectors [tokens, heads, channels] lie as this kernel reads them: contiguous channels, heads at multiples
    of 16 bytes.
    """
    return not any(x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8 or x.stride(2) != 1 for x in vectors)


def store(
    cache: LayerCache,
    slots: StoreSlots,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: PromptLayer,
    q: torch.Tensor | None = None,
    copies: Copies | None = None,
) -> torch.Tensor | None:
    """Write new tokens to the history pool, the ring and the sink store; rotate the queries in the same launch.

    Args:
        cache: the layer's cache, written in place.
        slots: destination of every token.
        k, v: [tokens, kv_heads, 128], bfloat16 or float16, that :func:`fits`; keys after RoPE.
        layer: from :func:`arrange`; without a value matrix where values come multiplied.
        q: [tokens, q_heads, 128] of the dtype of ``k``, to be rotated.
        copies: where keys and values go as well, in the dtype of ``k`` and in the basis of the cache.

    Returns:
        the rotated queries, contiguous, in the dtype of ``q``; None without ``q``.

    Raises:
        ValueError: shapes, dtypes, row layouts or addresses do not fit, or the kernel cannot be built for this cache.
    """
    plain, kv_heads, q_heads, tokens = layer.plain, cache.kv_heads, layer.q_heads, len(k)
    plain.check(cache)
    if (reason := unsupported(cache)) is not None:
        raise ValueError(f"the CUDA kernel for prompts does not support {reason}")
    for name, x, heads in (("k", k, kv_heads), ("v", v, kv_heads), ("q", q, q_heads)):
        if x is not None and (x.shape != (tokens, heads, HEAD_DIM) or x.dtype != k.dtype or not fits(x)):
            raise ValueError(
                f"{name} must be [{tokens}, {heads}, {HEAD_DIM}] of {k.dtype} with contiguous channels, heads at "
                "multiples of 16 bytes"
            )
    matrices = plain.key.matrix, plain.value.matrix, plain.key.reading
    for matrix, heads in zip(matrices, (kv_heads, kv_heads, q_heads), strict=True):
        if matrix is not None:
            matrix.check(heads, k.dtype, arranged=False)
    if copies is not None:
        copies.check(tokens, cache)
        if copies.k.dtype != k.dtype or copies.v.dtype != k.dtype:
            raise ValueError(f"copies must be of {k.dtype}")
    out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    variant, kind = kind_of(cache, layer, k.dtype)
    kernel = _load(variant, kind)

    def given(x: torch.Tensor, matrix: SplitMatrix | None, terms: torch.Tensor | None) -> ctypes.Structure:
        if matrix is None or terms is None:
            return _Input(x.data_ptr(), x.stride(0), x.stride(1), 0, 1.0)
        return _Input(x.data_ptr(), x.stride(0), x.stride(1), terms.data_ptr(), 1.0 / matrix.scale)

    def side(x: torch.Tensor, of: PreparedSide, terms: torch.Tensor | None, name: str) -> ctypes.Structure:
        written = (getattr(cache, f"{name}_{part}").data_ptr() for part in ("rows", "ring", "sink"))
        center = 0 if of.center is None else of.center.data_ptr()
        copy = 0 if copies is None else getattr(copies, name).data_ptr()
        return _Side(given(x, of.matrix, terms), center, clip_rank(HEAD_DIM, of.clip), of.gain, *written, copy)

    queries = _Queries(_Input(), 0)
    if q is not None and out is not None:
        queries = _Queries(given(q, plain.key.reading, layer.reading), out.data_ptr())
    counts = kv_heads, kv_heads, 0 if q is None else q_heads
    sets = kind[3:6]
    blocks = _cut(tokens, counts, (sets[0], sets[1], sets[2]), processors(k.device.index or 0))
    copied = (0, 0) if copies is None else (copies.rows.data_ptr(), copies.k.stride(0) // HEAD_DIM)
    launch(
        kernel, (sum(blocks), 1, 1), 128 * TEAMS, _shared_bytes(kind),
        [side(k, plain.key, layer.key, "k"), side(v, plain.value, layer.value, "v"), queries,
         _Slots(slots.row.data_ptr(), slots.ring.data_ptr(), slots.sink.data_ptr(), *copied),
         ctypes.c_int32(tokens), ctypes.c_int32(blocks[0]), ctypes.c_int32(blocks[1])],
        overlap=True,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def _cut(tokens: int, heads: tuple[int, int, int], sets: tuple[int, int, int], at_once: int) -> tuple[int, int, int]:
    """Blocks of keys, of values and of queries.

    Args:
        heads: of each; none of queries that are not rotated.
        sets: their matrices; a block has one, and each as many blocks.
        at_once: blocks that run at once.
    """
    tiles = [-(-tokens * (of // own) // TILE) for of, own in zip(heads, sets, strict=True)]
    weights = 1.0, 1.0, QUERIES
    shares = [1 if of else 0 for of in heads]  # blocks of a matrix

    def time(side: int) -> tuple[float, float]:
        """What the blocks of a side take, and, where others take as long, would with tiles cut as finely as needed."""
        if not shares[side] or shares[side] >= tiles[side]:
            return 0.0, 0.0
        return -(-tiles[side] // (TEAMS * shares[side])) * weights[side], tiles[side] / shares[side] * weights[side]

    # One more for whoever is done last.
    while True:
        last = max(range(3), key=time)
        if time(last) == (0.0, 0.0) or sum(map(int.__mul__, shares, sets)) + sets[last] > at_once:
            break
        shares[last] += 1
    return shares[0] * sets[0], shares[1] * sets[1], shares[2] * sets[2]
