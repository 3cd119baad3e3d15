"""Which kernel decodes on a GPU: CUDA C++ on Hopper, Triton elsewhere and in layers that leave a side exact.

The choice follows from the GPU and the shape of the model, is made once, at start-up, and said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal

import torch

from oscar_kernels.cache import BatchTables, LayerCache
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.errors import KernelError
from oscar_kernels.extend_plan import SHORT_BATCH, Decode
from oscar_kernels.triton import decode as triton
from sglang_oscar.errors import Int2Error

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_OSCAR_DECODE_BACKEND"
Setting = Literal["auto", "cuda", "triton"]
Verify = Callable[[LayerCache, BatchTables, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Attention of several new tokens per request; see :func:`oscar_kernels.reference.verify`."""


class CudaDecode:
    """The CUDA kernel with a workspace for batches of up to ``max_batch`` requests: launches follow each other.

    It reads codes. Layers that leave keys or values exact are the Triton kernel's.

    Args:
        caches: one layer of every kind of rows that the CUDA kernel reads.
        q_heads: query heads on this rank.
        max_batch: requests of a batch at most.
    """

    def __init__(self, caches: Sequence[LayerCache], q_heads: int, max_batch: int) -> None:
        workspaces = (cuda.make_workspace(cache, q_heads, max_batch) for cache in caches)
        self._workspace = max(workspaces, key=torch.Tensor.numel)

    def __call__(
        self,
        cache: LayerCache,
        tables: BatchTables,
        q_rot: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :func:`oscar_kernels.cuda.decode.decode`."""
        if cache.exact:
            return triton.decode(cache, tables, q_rot, sm_scale, lse=lse)
        return cuda.decode(cache, tables, q_rot, sm_scale, workspace=self._workspace, lse=lse)


class CudaVerify:
    """The CUDA kernel for ``drafts`` new tokens of each of up to ``max_batch`` requests, with a workspace of its own,
    and the Triton kernel where that decodes.

    Args:
        caches: one layer of every kind of rows that the CUDA kernel reads.
        q_heads: query heads on this rank.
        max_batch: requests of a batch at most.
        drafts: new tokens of a request.
    """

    def __init__(self, caches: Sequence[LayerCache], q_heads: int, max_batch: int, drafts: int) -> None:
        workspaces = (cuda.make_workspace(cache, q_heads, max_batch, drafts) for cache in caches)
        self._workspace = max(workspaces, key=torch.Tensor.numel)

    def __call__(
        self, cache: LayerCache, tables: BatchTables, visible: torch.Tensor, q_rot: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """See :func:`oscar_kernels.cuda.decode.verify`."""
        if cache.exact:
            return triton.verify(cache, tables, visible, q_rot, sm_scale)
        return cuda.verify(cache, tables, visible, q_rot, sm_scale, workspace=self._workspace)


def break_even_tokens(decode: Decode) -> int:
    """Queries on a long prefix that take as long as dequantizing it.

    Measured on an H200, both ways on prefixes of 8K to 100K tokens.
    """
    return 32 if isinstance(decode, CudaDecode) else 16


def check(setting: Setting, device: str) -> None:
    """Refuse a kernel that a device cannot run, before anything is loaded.

    Raises:
        Int2Error: a GPU kernel is asked for without a GPU.
    """
    if setting != "auto" and device != "cuda":
        raise Int2Error(f"{VARIABLE}={setting} needs --device cuda; unset it")


def choose(
    setting: Setting,
    caches: Sequence[LayerCache],
    page_size: int,
    q_heads: int,
    dtype: torch.dtype,
    max_batch: int,
    short_chunks: bool,
) -> Decode:
    """The kernel for a cache on a GPU, compiled and loaded.

    Args:
        setting: of the variable.
        caches: one layer of every kind of rows. Those with codes are read by one kernel.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        max_batch: requests of a decode batch at most.
        short_chunks: it reads the prefixes of short chunks, too (:mod:`oscar_kernels.ragged_extend`).

    Raises:
        Int2Error: ``cuda`` is asked for and cannot do this, or the kernel cannot be built on this machine.
    """
    reason = f"{VARIABLE}=triton"
    if setting != "triton":
        coded = _coded(caches) or caches
        reasons = (cuda.unsupported(cache, page_size, q_heads, dtype, max_batch) for cache in coded)
        unsupported = next(filter(None, reasons), None)
        if unsupported is None:
            try:
                for cache, lse in product(coded, (False, True) if short_chunks else (False,)):
                    cuda.prepare(cuda.variant_of(cache, page_size, q_heads, dtype, lse))
            except KernelError as error:
                raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
            beside = "" if len(coded) == len(caches) else ", Triton kernel in layers with keys or values of 16 bits"
            logger.info("int2 decode: CUDA kernel%s", beside)
            return CudaDecode(coded, q_heads, max(max_batch, SHORT_BATCH) if short_chunks else max_batch)
        if setting == "cuda":
            raise Int2Error(f"{VARIABLE}=cuda: {unsupported}; set it to auto or triton")
        reason = unsupported
    logger.info("int2 decode: Triton kernel, because %s", reason)
    return triton.decode


def choose_verify(
    decode: Decode, caches: Sequence[LayerCache], page_size: int, q_heads: int, dtype: torch.dtype, max_batch: int,
    drafts: int,
) -> Verify:  # fmt: skip
    """The kernel that attends to several new tokens of a request, compiled and loaded: of the kind that decodes.

    Args:
        decode: what was chosen for decode.
        caches: one layer of every kind of rows.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        max_batch: requests of a batch at most.
        drafts: new tokens of a request.

    Raises:
        Int2Error: the kernel cannot do this, or cannot be built on this machine.
    """
    if not isinstance(decode, CudaDecode):
        reasons = (triton.unsupported_verify(cache, q_heads, max_batch, drafts) for cache in caches)
        if (reason := next(filter(None, reasons), None)) is not None:
            raise Int2Error(f"{reason}; lower --max-running-requests or --speculative-num-draft-tokens")
        logger.info("int2 verification: Triton kernel, %d tokens of a request", drafts)
        return triton.verify
    coded = _coded(caches)
    reasons = (cuda.unsupported(cache, page_size, q_heads, dtype, max_batch, drafts) for cache in coded)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise Int2Error(f"{reason}; set {VARIABLE}=triton, or drop --speculative-algorithm")
    try:
        variants = [cuda.variant_of(cache, page_size, q_heads, dtype, drafts=drafts) for cache in coded]
        for variant in variants:
            cuda.prepare(variant)
    except KernelError as error:
        raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
    logger.info(
        "int2 verification: CUDA kernel, %d tokens of a request in %d passes",
        drafts,
        max(one.passes for one in variants),
    )
    return CudaVerify(coded, q_heads, max_batch, drafts)


def _coded(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Those with codes on both sides."""
    return [cache for cache in caches if not cache.exact]
