"""Cached prefixes as 16-bit keys and values on Hopper: the launch of ``src/prefix.cu``."""

from __future__ import annotations

import ctypes
from functools import cache as cached
from typing import Any

import torch

from oscar_kernels.cache import BatchTables, LayerCache, check_16_bit_rows
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import POINTER, launch, struct
from oscar_kernels.cuda.tables import describe
from oscar_kernels.cuda.together import Job
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.layout import CODEBOOK
from oscar_kernels.spans import Spans

SOURCE = "prefix.cu"
THREADS = 256
_Side = struct("Side", [("rows", POINTER), ("sink", POINTER), ("ring", POINTER), ("out", POINTER)])
_Spans = struct("Spans", [("request", POINTER), ("begin", POINTER), ("indptr", POINTER), ("count", ctypes.c_int32)])


def rows_of_warp(variant: Variant) -> int:
    """Output rows of a warp: four of eight heads of 128 channels, as much of others."""
    return min(max(4096 // (variant.kv_heads * variant.head_dim), 4), 32)


def unsupported(variant: Variant) -> str | None:
    """What of a cache's rows this kernel does not read, or None."""
    return "codebooks" if variant.key.coding == CODEBOOK else variant.unsupported()


def variant_of(cache: LayerCache, page_size: int, dtype: torch.dtype) -> Variant:
    """What the kernel must be compiled for to write a cache's prefixes in ``dtype``."""
    return Variant(cache.k_layout, cache.v_layout, cache.windows, 1, page_size, dtype, cache.k_ring.dtype)


def defines(variant: Variant) -> tuple[tuple[str, int], ...]:
    """The macros that ``src/prefix.cu`` is compiled with."""
    own = {"OSCAR_PREFIX_THREADS": THREADS, "OSCAR_PREFIX_ROWS": rows_of_warp(variant)}
    return tuple(sorted({**dict(variant.defines()), **own}.items()))


def job(variant: Variant) -> Job:
    """What is compiled for it."""
    return SOURCE, defines(variant)


@cached
def prepare(variant: Variant) -> Any:
    """Compile (or find in the cache) and load the kernel, so that no failure waits for the first request.

    Raises:
        KernelError: the kernel cannot be built or loaded on this machine.
        ValueError: it does not read such rows.
    """
    if (reason := unsupported(variant)) is not None:
        raise ValueError(f"the CUDA kernel for prefixes does not support {reason}")
    return load(SOURCE, "oscar_prefix", defines(variant), 0)


def copy_prefixes(
    cache: LayerCache, tables: BatchTables, spans: Spans, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """As :func:`oscar_kernels.triton.prefix.copy_prefixes`, bit for bit.

    Raises:
        ValueError: shapes, strides or row layouts do not fit, or the kernel cannot be built for this cache.
    """
    check_16_bit_rows(k_out, v_out, cache)
    rows, count = len(k_out), len(spans.requests)
    if not rows or not count:
        return
    variant = variant_of(cache, tables.page_size, k_out.dtype)

    def side(name: str, out: torch.Tensor) -> ctypes.Structure:
        read = (getattr(cache, f"{name}_{part}").data_ptr() for part in ("rows", "sink", "ring"))
        return _Side(*read, out.data_ptr())

    blocks = -(-rows // (rows_of_warp(variant) * THREADS // 32))
    launch(
        prepare(variant), (2 * blocks, 1, 1), THREADS, 0,
        [side("k", k_out), side("v", v_out),
         _Spans(*(index.data_ptr() for index in spans), count),
         describe(tables, len(tables.kv_lens)), ctypes.c_int32(rows),
         ctypes.c_int32(k_out.stride(0) // cache.head_dim)],
        overlap=True,
    )  # fmt: skip
