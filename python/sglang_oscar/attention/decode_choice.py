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
from oscar_kernels.prepared import SplitMatrix
from oscar_kernels.triton import decode as triton
from sglang_oscar.errors import Int2Error

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_OSCAR_DECODE_BACKEND"
Setting = Literal["auto", "cuda", "triton"]
Verify = Callable[[LayerCache, BatchTables, torch.Tensor, torch.Tensor, float, SplitMatrix | None], torch.Tensor]
"""Attention of several new tokens per request; see :func:`oscar_kernels.reference.verify`."""


class TritonDecode:
    """The Triton kernel, for every kind of rows.

    Args:
        workspace: float32 of :func:`workspace_numel` elements or more: launches follow each other.
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        self.workspace = workspace

    def __call__(
        self,
        cache: LayerCache,
        tables: BatchTables,
        q_rot: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
        reading: SplitMatrix | None = None,
    ) -> torch.Tensor:
        """See :func:`oscar_kernels.triton.decode.decode`."""
        return triton.decode(cache, tables, q_rot, sm_scale, workspace=self.workspace, lse=lse, reading=reading)

    def verify(
        self, cache: LayerCache, tables: BatchTables, visible: torch.Tensor, q_rot: torch.Tensor, sm_scale: float,
        reading: SplitMatrix | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :func:`oscar_kernels.triton.decode.verify`."""
        return triton.verify(cache, tables, visible, q_rot, sm_scale, workspace=self.workspace, reading=reading)


class CudaDecode:
    """The CUDA kernel. It reads codes; layers that leave keys or values exact are the Triton kernel's.

    Args:
        workspace: float32 of :func:`workspace_numel` zeros or more: launches follow each other.
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        self._workspace = workspace
        # Behind the counters, which are the CUDA kernel's alone.
        self._exact = TritonDecode(workspace[cuda.MAX_BATCH :])

    def __call__(
        self,
        cache: LayerCache,
        tables: BatchTables,
        q_rot: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
        reading: SplitMatrix | None = None,
    ) -> torch.Tensor:
        """See :func:`oscar_kernels.cuda.decode.decode`."""
        if cache.exact:
            return self._exact(cache, tables, q_rot, sm_scale, lse=lse, reading=reading)
        return cuda.decode(cache, tables, q_rot, sm_scale, workspace=self._workspace, lse=lse, reading=reading)

    def verify(
        self, cache: LayerCache, tables: BatchTables, visible: torch.Tensor, q_rot: torch.Tensor, sm_scale: float,
        reading: SplitMatrix | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :func:`oscar_kernels.cuda.decode.verify`."""
        if cache.exact:
            return self._exact.verify(cache, tables, visible, q_rot, sm_scale, reading)
        return cuda.verify(cache, tables, visible, q_rot, sm_scale, workspace=self._workspace, reading=reading)


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


def workspace_numel(
    setting: Setting,
    caches: Sequence[LayerCache],
    page_size: int,
    q_heads: int,
    dtype: torch.dtype,
    max_batch: int,
    short_chunks: bool,
    drafts: int = 0,
) -> int:
    """float32 elements that decode, the prefixes of short chunks and verification take turns to use.

    Args:
        setting, caches, page_size, q_heads, dtype, max_batch, short_chunks, drafts: as in :func:`choose`; of the
            caches only layouts, windows and device matter.
    """
    batch = max(max_batch, SHORT_BATCH) if short_chunks else max_batch
    by_cuda = _not_cuda(setting, caches, page_size, q_heads, dtype, max_batch) is None
    sizes = []
    for cache in caches:
        for requests, new in ((batch, 0), (max_batch, drafts)) if drafts else ((batch, 0),):
            if by_cuda and not cache.exact:
                sizes.append(cuda.workspace_numel(cache, q_heads, requests, new))
            else:
                counters = cuda.MAX_BATCH if by_cuda else 0
                sizes.append(counters + triton.workspace_numel(cache, q_heads, requests, drafts=new))
    return max(sizes)


def _not_cuda(
    setting: Setting, caches: Sequence[LayerCache], page_size: int, q_heads: int, dtype: torch.dtype, max_batch: int
) -> str | None:
    """Why the CUDA kernel does not decode; None where it does."""
    if setting == "triton":
        return f"{VARIABLE}=triton"
    reasons = (cuda.unsupported(cache, page_size, q_heads, dtype, max_batch) for cache in _coded(caches) or caches)
    return next(filter(None, reasons), None)


def choose(
    setting: Setting,
    caches: Sequence[LayerCache],
    page_size: int,
    q_heads: int,
    dtype: torch.dtype,
    max_batch: int,
    short_chunks: bool,
    drafts: int = 0,
    readings: Sequence[SplitMatrix | None] = (None,),
) -> CudaDecode | TritonDecode:
    """The kernel for a cache on a GPU, compiled and loaded, with a workspace.

    Args:
        setting: of the variable.
        caches: one layer of every kind of rows. Those with codes are read by one kernel.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        max_batch: requests of a decode batch at most.
        short_chunks: it reads the prefixes of short chunks, too (:mod:`oscar_kernels.ragged_extend`).
        drafts: new tokens of a request that are verified at once; 0 without speculation.
        readings: what outputs of decode are multiplied by, those of one layer of every kind.

    Raises:
        Int2Error: ``cuda`` is asked for and cannot do this, or the kernel cannot be built on this machine.
    """
    reason = _not_cuda(setting, caches, page_size, q_heads, dtype, max_batch)
    numel = workspace_numel(setting, caches, page_size, q_heads, dtype, max_batch, short_chunks, drafts)
    workspace = torch.zeros(numel, dtype=torch.float32, device=caches[0].k_rows.device)
    if reason is None:
        coded = _coded(caches) or caches
        try:
            for cache in coded:
                for reading in readings:
                    cuda.prepare(cuda.variant_of(cache, page_size, q_heads, dtype, reading=reading))
                for lse in (False, True) if short_chunks else ():
                    cuda.prepare(cuda.variant_of(cache, page_size, q_heads, dtype, lse))
        except KernelError as error:
            raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
        beside = "" if len(coded) == len(caches) else ", Triton kernel in layers with keys or values of 16 bits"
        logger.info("int2 decode: CUDA kernel%s", beside)
        return CudaDecode(workspace)
    if setting == "cuda":
        raise Int2Error(f"{VARIABLE}=cuda: {reason}; set it to auto or triton")
    logger.info("int2 decode: Triton kernel, because %s", reason)
    return TritonDecode(workspace)


def choose_verify(
    decode: CudaDecode | TritonDecode, caches: Sequence[LayerCache], page_size: int, q_heads: int, dtype: torch.dtype,
    max_batch: int, drafts: int, readings: Sequence[SplitMatrix | None] = (None,),
) -> Verify:  # fmt: skip
    """The kernel that attends to several new tokens of a request, compiled and loaded: of the kind that decodes.

    Args:
        decode: what was chosen for decode, with room for these drafts in its workspace.
        caches: one layer of every kind of rows.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        max_batch: requests of a batch at most.
        drafts: new tokens of a request.
        readings: as in :func:`choose`.

    Raises:
        Int2Error: the kernel cannot do this, or cannot be built on this machine.
    """
    if not isinstance(decode, CudaDecode):
        reasons = (triton.unsupported_verify(cache, q_heads, max_batch, drafts) for cache in caches)
        if (reason := next(filter(None, reasons), None)) is not None:
            raise Int2Error(f"{reason}; lower --max-running-requests or --speculative-num-draft-tokens")
        logger.info("int2 verification: Triton kernel, %d tokens of a request", drafts)
        return decode.verify
    coded = _coded(caches)
    reasons = (cuda.unsupported(cache, page_size, q_heads, dtype, max_batch, drafts) for cache in coded)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise Int2Error(f"{reason}; set {VARIABLE}=triton, or drop --speculative-algorithm")
    try:
        variants = [
            cuda.variant_of(cache, page_size, q_heads, dtype, drafts=drafts, reading=reading)
            for cache, reading in product(coded, readings)
        ]
        for variant in variants:
            cuda.prepare(variant)
    except KernelError as error:
        raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
    logger.info(
        "int2 verification: CUDA kernel, %d tokens of a request in %d passes",
        drafts,
        max(one.passes for one in variants),
    )
    return decode.verify


def _coded(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Those with codes on both sides."""
    return [cache for cache in caches if not cache.exact]
