"""Decode attention on Hopper: the launch of ``src/decode.cu``, in verification of ``src/verify.cu`` where that fits."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oscar_kernels.cache import BatchTables, LayerCache, check_lse, check_queries, check_visible
from oscar_kernels.cuda.books import arranged_book, has_shared_book
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import POINTER, launch, processors, struct
from oscar_kernels.cuda.tables import describe
from oscar_kernels.cuda.together import compile_together
from oscar_kernels.cuda.variant import MAX_BATCH, MOST_COLUMNS, PRODUCT_COLUMNS, TILE, Variant
from oscar_kernels.prepared import Output, SplitMatrix

READING_TERMS = 2
"""16-bit terms at most of what outputs are multiplied by: outputs have 16 bits, so the third would not be seen."""

_Query = struct("Query", [("q", POINTER), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64),
                           ("sm_scale", ctypes.c_float), ("visible", POINTER)])  # fmt: skip
_BUFFERS = ("k_rows", "v_rows", "k_sink", "v_sink", "k_ring", "v_ring")
_Buffers = struct("Buffers", [(name, POINTER) for name in _BUFFERS])
_Partials = struct("Partials", [("out", POINTER), ("lse", POINTER), ("counters", POINTER),
                                 ("spill", POINTER)])  # fmt: skip
_Result = struct("Result", [("out", POINTER), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64),
                             ("lse", POINTER)])  # fmt: skip
_Reading = struct("Reading", [("terms", POINTER), ("unscale", ctypes.c_float)])
_Books = struct("Books", [("points", POINTER)])


def arrange_reading(matrix: SplitMatrix | None) -> SplitMatrix | None:
    """What outputs are multiplied by, as the kernel reads it: column after column, and no more terms than it needs."""
    if matrix is None:
        return None
    return SplitMatrix(matrix.terms[:, :READING_TERMS].mT.contiguous(), matrix.scale, arranged=True)


def variant_of(
    cache: LayerCache, page_size: int, q_heads: int, q_dtype: torch.dtype, lse: bool = False, drafts: int = 0,
    reading: SplitMatrix | None = None,
) -> Variant:  # fmt: skip
    """What a cache and its queries need the kernel compiled for.

    Args:
        cache: any layer's.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        q_dtype: of queries.
        lse: log-sum-exps are written, too.
        drafts: new tokens of a request in verification; 0 for decode. As many of them are worked on at once as there
            are columns for, in passes of one size: twice as many by ``src/verify.cu`` as by ``src/decode.cu``.
        reading: what outputs are multiplied by.
    """
    gqa = q_heads // cache.kv_heads
    plain = Variant(
        cache.k_layout, cache.v_layout, cache.windows, gqa, page_size, q_dtype, cache.k_ring.dtype, lse,
        shared_book=has_shared_book(cache),
    )  # fmt: skip
    if reading is not None:
        plain = replace(plain, reading_terms=min(reading.count, READING_TERMS), reading_sets=reading.sets)
    return plain if drafts == 0 else _with_warpgroups(plain, drafts) or _in_passes(plain, drafts)


def _in_passes(plain: Variant, drafts: int) -> Variant:
    """A variant of ``src/decode.cu`` for so many new tokens of a request."""
    for queries in range(_queries(plain.gqa, drafts, MOST_COLUMNS), 0, -1):
        variant = replace(plain, drafts=drafts, queries=queries)
        if variant.unsupported() is None:
            break
    return variant


def _with_warpgroups(plain: Variant, drafts: int) -> Variant | None:
    """One of ``src/verify.cu``; None where it cannot do this, or its passes have no more columns than the other's."""
    if not plain.fits_warpgroups():  # most do not, and each launch asks
        return None
    variant = replace(plain, drafts=drafts, queries=_queries(plain.gqa, drafts, PRODUCT_COLUMNS), warpgroups=True)
    return variant if variant.columns > MOST_COLUMNS and variant.unsupported() is None else None


def _queries(gqa: int, drafts: int, most: int) -> int:
    """Tokens of a pass that has ``most`` columns at most: passes have one size, and are as few as can be."""
    passes = -(-drafts // max(min(most // gqa, drafts), 1))
    return -(-drafts // passes)


DEFAULT_MPS_PIPES = Path("/tmp/nvidia-mps")
"""Where clients of the Multi-Process Service look for it unless a variable says otherwise."""


def _multi_process_service() -> str | None:
    """What says that processes share this GPU's multiprocessors, or None.

    Blocks that work on the same request wait for each other, so all blocks of a launch must be on the GPU at once. That
    is so where a process has the GPU to itself or for a slice of time, but not beside another process's blocks.
    """
    names = sorted(name for name in os.environ if name.startswith("CUDA_MPS_"))
    if names:
        return f"{names[0]} is set"
    return f"{DEFAULT_MPS_PIPES} exists" if (DEFAULT_MPS_PIPES / "control").exists() else None


def unsupported(
    cache: LayerCache, page_size: int, q_heads: int, q_dtype: torch.dtype, max_batch: int = 1, drafts: int = 0
) -> str | None:
    """Why :func:`decode`, or :func:`verify` with ``drafts``, cannot run on this cache on this device, in a few words;
    None where it can.
    """
    device = cache.k_rows.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "the GPU is not of compute capability 9.0"
    shared = _multi_process_service()
    if shared is not None:
        return f"the CUDA kernel cannot share a GPU through the Multi-Process Service ({shared})"
    variant = variant_of(cache, page_size, q_heads, q_dtype, drafts=drafts)
    if max_batch * variant.passes > MAX_BATCH:
        return f"the CUDA kernel takes {MAX_BATCH // variant.passes} requests at a time, not {max_batch}"
    reason = variant.unsupported()
    return reason and f"the CUDA kernel does not support {reason}"


def build(variants: Iterable[Variant]) -> None:
    """:func:`prepare` several, compiled at once."""
    wanted = list(variants)
    compile_together((variant.source, variant.defines()) for variant in wanted)
    for variant in wanted:
        prepare(variant)


def prepare(variant: Variant) -> Any:
    """Compile (or find in the cache) and load the kernel: a few seconds the first time.

    Raises:
        ValueError: the variant is not supported.
        KernelError: the kernel cannot be built or loaded on this machine.
    """
    reason = variant.unsupported()
    if reason:
        raise ValueError(f"the CUDA decode kernel does not support {reason}")
    return load(variant.source, variant.function, variant.defines(), variant.shared_bytes)


def _slots(device: torch.device, batch: int) -> int:
    return processors(device.index or 0) + batch


def make_workspace(cache: LayerCache, q_heads: int, batch: int, drafts: int = 0) -> torch.Tensor:
    """A workspace for :func:`decode`, or :func:`verify` with ``drafts``, of up to ``batch`` requests, on the cache's
    device.

    Returns:
        float32: counters, one for every request that a batch may have, then partial results, then what sums of long
        segments were. Counters are zeros here and after every launch; nothing else may write to them.
    """
    numel = workspace_numel(cache, q_heads, batch, drafts)
    return torch.zeros(numel, dtype=torch.float32, device=cache.k_rows.device)


def workspace_numel(cache: LayerCache, q_heads: int, batch: int, drafts: int = 0) -> int:
    """float32 elements of :func:`make_workspace`. One that is larger does, too."""
    # The page size does not matter to the size, and dtypes only in which of two kernels verifies.
    variant = variant_of(cache, TILE, q_heads, cache.k_ring.dtype, drafts=drafts)
    either = [variant] if not drafts else [variant, _in_passes(replace(variant, warpgroups=False), drafts)]
    return max(_workspace_numel(one, cache.k_rows.device, batch) for one in either)


def _workspace_numel(variant: Variant, device: torch.device, batch: int) -> int:
    heads, head_dim = variant.kv_heads * variant.columns, variant.head_dim
    batch *= variant.passes
    spilled = processors(device.index or 0) * variant.spill_floats
    return MAX_BATCH + _slots(device, batch) * heads * (head_dim + 1) + spilled


def decode(
    cache: LayerCache,
    tables: BatchTables,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    reading: SplitMatrix | None = None,
) -> torch.Tensor:
    """Attention of one query per request over its cached tokens, in a decode step the new one included.

    Nothing depends on lengths on the host, so a captured CUDA graph stays valid when ``tables`` change in place. The
    result does not depend on timing: repeated runs agree bit for bit. Where the launch before this one is that of
    :func:`oscar_kernels.cuda.store.store` for a decode step, history is read while it still runs.

    Args:
        cache: the layer's cache; in a decode step the new tokens are stored in it already. Every tensor is contiguous.
        tables: the batch; ``kv_lens`` counts what is attended to. Requests of length 0 get zeros.
        q_rot: [batch, q_heads, head_dim], rotated, bfloat16 or float16; channels contiguous, heads at multiples of
            16 bytes.
        sm_scale: factor on the logits.
        out: [batch, q_heads, head_dim] in the dtype of ``q_rot`` with contiguous channels; allocated where None.
        workspace: from :func:`make_workspace`, for at least this batch; allocated where None. Launches that may run at
            the same time need one each.
        lse: float32 [batch, q_heads], contiguous; takes the log2 of the sum of exp2 of the logits (times log2 e), -inf
            for requests of length 0. Nothing of the kind is written where None.
        reading: what outputs are multiplied by before they are written, from :func:`arrange_reading`.

    Returns:
        ``out``, in the basis of the cached values, or of what ``reading`` makes of it.

    Raises:
        ValueError: shapes or dtypes do not fit, or the kernel cannot do this (:func:`unsupported`).
        KernelError: the kernel cannot be built, loaded or launched.
    """
    return run(call_of(cache, tables, None, q_rot, sm_scale, workspace, Output(out, lse, reading)))


def verify(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor,
    q_rot: torch.Tensor,
    sm_scale: float,
    workspace: torch.Tensor | None = None,
    reading: SplitMatrix | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of several new tokens per request, as :func:`oscar_kernels.reference.verify` defines it.

    A pass over a request reads its history once for as many tokens as there are columns for: 16 over query heads per kv
    head, or 32 over them where :attr:`~oscar_kernels.cuda.variant.Variant.warpgroups` can multiply. All that is said of
    :func:`decode` holds here, too.

    Args:
        cache: the layer's cache; the new tokens are stored in it already. Every tensor is contiguous.
        tables: the batch; ``kv_lens`` counts the tokens before the new ones.
        visible: int64 [batch, tokens], contiguous: which new tokens each of them sees
            (:mod:`oscar_kernels.visible`).
        q_rot: [batch * tokens, q_heads, head_dim], otherwise as for :func:`decode`.
        sm_scale: factor on the logits.
        workspace: from :func:`make_workspace` for at least this batch and these drafts; allocated where None.
        reading, lse: as for :func:`decode`; there is one sum for every new token.

    Returns:
        Like ``q_rot``, as :func:`decode`.

    Raises:
        ValueError, KernelError: as :func:`decode`.
    """
    return run(call_of(cache, tables, visible, q_rot, sm_scale, workspace, Output(None, lse, reading)))


class Call(NamedTuple):
    """What the kernel is launched with for one cache; ``arguments`` are addresses in tensors that have to be kept."""

    variant: Variant
    out: torch.Tensor
    workspace: torch.Tensor
    arguments: list[ctypes._SimpleCData[Any] | ctypes.Structure]


def call_of(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor | None,
    q_rot: torch.Tensor,
    sm_scale: float,
    workspace: torch.Tensor | None,
    output: Output,
) -> Call:
    """What :func:`decode`, or :func:`verify` where ``visible`` is not None, launches the kernel with.

    Raises:
        ValueError: as there.
    """
    out, lse, reading = output
    tokens, q_heads, head_dim = q_rot.shape
    batch, drafts = (tokens, 0) if visible is None else visible.shape
    check_queries(cache, q_rot)
    if visible is not None:
        check_visible(cache.windows, visible, tokens)
    if q_rot.data_ptr() % 16 or q_rot.stride(0) % 8 or q_rot.stride(1) % 8:
        raise ValueError("queries must begin at multiples of 16 bytes")
    variant = variant_of(cache, tables.page_size, q_heads, q_rot.dtype, lse is not None, drafts, reading)
    if batch * variant.passes > MAX_BATCH:
        raise ValueError(f"a batch has at most {MAX_BATCH // variant.passes} requests, got {batch}")
    out = torch.empty(q_rot.shape, dtype=q_rot.dtype, device=q_rot.device) if out is None else out
    if out.dtype != q_rot.dtype or out.shape != q_rot.shape or out.stride(2) != 1:
        raise ValueError(f"out must be {tuple(q_rot.shape)} of {q_rot.dtype} with contiguous channels")
    check_lse(lse, tokens, q_heads)
    if reading is not None:
        reading.check(cache.kv_heads, q_rot.dtype, arranged=True)
    slots = _slots(q_rot.device, batch * variant.passes)
    if workspace is None:
        workspace = make_workspace(cache, q_heads, batch, drafts)
    numel = _workspace_numel(variant, q_rot.device, batch)
    if workspace.numel() < numel or workspace.dtype != torch.float32:
        raise ValueError(f"workspace must hold {numel} float32, got {workspace.numel()} {workspace.dtype}")
    counters = workspace.data_ptr()
    partial = counters + 4 * MAX_BATCH
    rows = slots * cache.kv_heads * variant.columns
    partial_lse = partial + 4 * rows * head_dim
    spill = partial_lse + 4 * rows

    query = _Query(
        q_rot.data_ptr(), q_rot.stride(0), q_rot.stride(1), sm_scale, 0 if visible is None else visible.data_ptr()
    )
    buffers = _Buffers(*(getattr(cache, name).data_ptr() for name in _BUFFERS))
    described = describe(tables, batch * variant.passes)
    return Call(
        variant, out, workspace,
        [query, buffers, described, _Partials(partial, partial_lse, counters, spill),
         _Result(out.data_ptr(), out.stride(0), out.stride(1), 0 if lse is None else lse.data_ptr()),
         _Reading(0, 1.0) if reading is None else _Reading(reading.terms.data_ptr(), 1.0 / reading.scale),
         _Books(0 if cache.k_codebook is None else arranged_book(cache.k_codebook).data_ptr())],
    )  # fmt: skip


def run(call: Call) -> torch.Tensor:
    """Launch the kernel for one cache, where there is a token; returns the output."""
    if not len(call.out):
        return call.out
    kernel, variant = prepare(call.variant), call.variant
    # Blocks that share a request wait for each other, so all of them must be on the GPU at once: one a multiprocessor.
    # A cooperative launch would have the driver vouch for that, but that it may start early is not documented; what
    # could keep multiprocessors away is refused instead (_multi_process_service).
    blocks = processors(call.out.device.index or 0)
    launch(kernel, (blocks, 1, 1), variant.threads, variant.shared_bytes, call.arguments, overlap=True)
    return call.out
