"""Store of a decode step on Hopper: the launch of ``src/store.cu``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from oscar_kernels.cache import LayerCache, StoreSlots
from oscar_kernels.codec import STRETCH, clip_rank
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import POINTER, launch, processors, struct
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.triton.store import Rotation

VECTORS = 16
"""Vectors of a block: rows of a tensor-core product."""
_STRIDES = [("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]
_MATRIX = [("terms", POINTER), ("unscale", ctypes.c_float)]
_Side = struct("Side", [("x", POINTER), *_STRIDES, *_MATRIX, ("center", POINTER), ("rank", ctypes.c_int32),
                        ("gain", ctypes.c_float), ("rows", POINTER), ("ring", POINTER), ("sink", POINTER)])  # fmt: skip
_Queries = struct("Queries", [("x", POINTER), *_STRIDES, *_MATRIX, ("out", POINTER)])
_Slots = struct("Slots", [("row", POINTER), ("ring", POINTER), ("sink", POINTER)])


def arrange(rotation: Rotation | None) -> Rotation | None:
    """A prepared rotation in the order in which the lanes of the kernel read it.

    A lane of warp w multiplies, for channels 32 u + 8 c + 4 e + (0..3), columns 16 w + n and 16 w + 8 + n: with
    lane = 4 n + c, terms become [term, w, u, e, n, c, column / 8, 2, 2], 16 bytes a lane.
    """
    if rotation is None:
        return None
    count, dim, _ = rotation.terms.shape
    parts = rotation.terms.view(count, dim // 32, 4, 2, 2, 2, dim // 16, 2, 8)
    ordered = parts.permute(0, 6, 1, 3, 8, 2, 7, 4, 5).contiguous()
    return Rotation(ordered.view(count, dim, dim), rotation.scale)


def _terms(rotation: Rotation | None) -> int:
    return 0 if rotation is None else rotation.terms.shape[0]


def prepare(
    variant: Variant,
    k_rotation: Rotation | None,
    v_rotation: Rotation | None,
    q_rotation: Rotation | None,
    centered: bool,
    fitted: tuple[bool, bool] = (False, False),
) -> Any:
    """Compile (or find in the cache) and load the kernel for a variant: a second or two the first time.

    ``fitted``: whether keys, and values, have a gain; see :func:`store`.
    """
    return _load(variant, _terms(k_rotation), _terms(v_rotation), _terms(q_rotation), centered, fitted)


@cache
def _load(variant: Variant, k_terms: int, v_terms: int, q_terms: int, centered: bool, fitted: tuple[bool, bool]) -> Any:
    return load("store.cu", "oscar_store", defines(variant, k_terms, v_terms, q_terms, centered, fitted), 0)


def defines(
    variant: Variant,
    k_terms: int,
    v_terms: int,
    q_terms: int,
    centered: bool,
    fitted: tuple[bool, bool] = (False, False),
) -> tuple[tuple[str, int], ...]:
    """The macros that ``src/store.cu`` is compiled with; 0 terms rotate nothing."""
    own = {"K_TERMS": k_terms, "V_TERMS": v_terms, "Q_TERMS": q_terms, "HAS_CENTER": centered}
    own |= {"K_FITTED": fitted[0], "V_FITTED": fitted[1]}
    own |= {"VECTORS": VECTORS, "STRETCH_64THS": int(64 * STRETCH)}
    both = dict(variant.defines()) | {f"OSCAR_{name}": int(value) for name, value in own.items()}
    return tuple(sorted(both.items()))


def _check(name: str, x: torch.Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    if x.shape[1:] != (heads, head_dim) or x.stride(2) != 1 or x.dtype != dtype:
        raise ValueError(f"{name} must be [tokens, {heads}, {head_dim}] of {dtype} with contiguous channels")
    if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8:
        raise ValueError(f"{name} must have heads at multiples of 16 bytes")


def store(
    cache: LayerCache,
    page_size: int,
    slots: StoreSlots,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    k_rotation: Rotation | None,
    v_rotation: Rotation | None,
    k_clip: float,
    v_clip: float,
    k_center: torch.Tensor | None = None,
    q_rotation: Rotation | None = None,
    decoding: bool = False,
    k_gain: float = 0.0,
    v_gain: float = 0.0,
) -> torch.Tensor:
    """Write new tokens to the history pool, the ring and the sink store; rotate the queries in the same launch.

    Meant for decode: with many tokens a kernel with larger tiles reads the rotations less often.

    Args:
        cache: the layer's cache, written in place.
        page_size: tokens of a page.
        slots: destination of every token.
        k, v, q: [tokens, heads, head_dim], bfloat16 or float16; keys and queries after RoPE. Channels contiguous, heads
            at multiples of 16 bytes.
        k_rotation, v_rotation: from :func:`arrange`; None where the vectors come rotated already.
        k_clip, v_clip: clip ratios.
        k_center: float32 [kv_heads, head_dim], contiguous, subtracted from the rotated keys; None for nothing.
        q_rotation: what queries are rotated with; ``k_rotation`` where None.
        decoding: every token is the newest of a request of its own, so a decode kernel launched next may start early.
        k_gain, v_gain: of scales and zero points fitted to the codes, see
            :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps those of the range.

    Returns:
        the rotated queries, contiguous, in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or addresses do not fit, or the kernel cannot be built for this cache.
    """
    layout = cache.layout
    tokens, q_heads, head_dim = q.shape
    for name, x, heads in (("k", k, layout.kv_heads), ("v", v, layout.kv_heads), ("q", q, q_heads)):
        _check(name, x, heads, layout.head_dim, q.dtype)
    if k_center is not None and (k_center.dtype != torch.float32 or not k_center.is_contiguous()):
        raise ValueError("k_center must be contiguous float32")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    queries = k_rotation if q_rotation is None else q_rotation
    variant = Variant(layout, cache.windows, q_heads // layout.kv_heads, page_size, q.dtype, cache.k_ring.dtype)
    kernel = prepare(variant, k_rotation, v_rotation, queries, k_center is not None, (k_gain > 0, v_gain > 0))

    def matrix(rotation: Rotation | None) -> tuple[int, float]:
        return (0, 1.0) if rotation is None else (rotation.terms.data_ptr(), 1.0 / rotation.scale)

    def side(
        x: torch.Tensor, rotation: Rotation | None, center: torch.Tensor | None, clip: float, gain: float, name: str
    ) -> ctypes.Structure:
        written = (getattr(cache, f"{name}_{part}").data_ptr() for part in ("rows", "ring", "sink"))
        at = 0 if center is None else center.data_ptr()
        rank = clip_rank(head_dim, clip)
        return _Side(x.data_ptr(), x.stride(0), x.stride(1), *matrix(rotation), at, rank, gain, *written)

    query_tiles = -(-tokens * q_heads // VECTORS)
    # Half the vectors a block, where all blocks run at once nevertheless.
    vectors = VECTORS // 2
    if 2 * -(-tokens * layout.kv_heads // vectors) + query_tiles > processors(q.device.index or 0):
        vectors = VECTORS
    tiles = 2 * -(-tokens * layout.kv_heads // vectors) + query_tiles
    launch(
        kernel, (tiles, 1, 1), 2 * head_dim, 0,
        [side(k, k_rotation, k_center, k_clip, k_gain, "k"), side(v, v_rotation, None, v_clip, v_gain, "v"),
         _Queries(q.data_ptr(), q.stride(0), q.stride(1), *matrix(queries), out.data_ptr()),
         _Slots(slots.row.data_ptr(), slots.ring.data_ptr(), slots.sink.data_ptr()), ctypes.c_int32(tokens),
         ctypes.c_int32(vectors), ctypes.c_int32(decoding)],
        overlap=True,
    )  # fmt: skip
    return out
