"""Which kernel decodes on a GPU: CUDA C++ on Hopper, Triton elsewhere and in layers that leave a side exact.

The choice follows from the GPU and the shape of the model, is made once, at start-up, and said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from oscar_kernels.cache import BatchTables, LayerCache
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.cuda import pair
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.errors import KernelError
from oscar_kernels.extend_plan import SHORT_BATCH, Decode
from oscar_kernels.parts import Part, join_heads
from oscar_kernels.prepared import SplitMatrix
from oscar_kernels.triton import decode as triton
from sglang_oscar.errors import Int2Error

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_OSCAR_DECODE_BACKEND"
ALIGNED = 128
"""float32 elements of a workspace that its halves are a multiple of."""
Setting = Literal["auto", "cuda", "triton"]


class TritonDecode:
    """The Triton kernel, for every kind of rows.

    Args:
        workspace: float32 of :meth:`DecodeTask.workspace_numel` elements or more: launches follow each other.
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

    def attend(
        self, parts: Sequence[Part], tables: BatchTables, visible: torch.Tensor | None, sm_scale: float
    ) -> torch.Tensor:
        """Attention of a step, of which new tokens are stored.

        Args:
            parts: of the layer, in the order of their heads.
            tables: the batch.
            visible: int64 [batch, tokens], which new tokens of a request each of them sees; None in decode.
            sm_scale: factor on the logits.

        Returns:
            [tokens, q_heads, head_dim of the values].
        """
        return join_heads(self._part(part, tables, visible, sm_scale) for part in parts)

    def _part(self, part: Part, tables: BatchTables, visible: torch.Tensor | None, sm_scale: float) -> torch.Tensor:
        cache, q_rot, lse, reading = part
        if visible is None:
            return self(cache, tables, q_rot, sm_scale, lse=lse, reading=reading)
        return triton.verify(
            cache, tables, visible, q_rot, sm_scale, workspace=self.workspace, reading=reading, lse=lse
        )


class CudaDecode:
    """The CUDA kernel. It reads codes; layers that leave keys or values exact are the Triton kernel's.

    Args:
        workspace: float32 of :meth:`DecodeTask.workspace_numel` zeros or more: launches follow each other.
        halved: layers are cut. Then the second half is that of second parts alone: whatever else is launched has the
            first, and leaves the counters of the second at 0.
    """

    def __init__(self, workspace: torch.Tensor, halved: bool = False) -> None:
        self._workspace, *self._second = workspace.chunk(2) if halved else (workspace,)
        # Behind the counters, which are the CUDA kernel's alone.
        self._exact = TritonDecode(self._workspace[cuda.MAX_BATCH :])

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

    def attend(
        self, parts: Sequence[Part], tables: BatchTables, visible: torch.Tensor | None, sm_scale: float
    ) -> torch.Tensor:
        """See :meth:`TritonDecode.attend`."""
        if len(parts) == 2 and not any(part.cache.exact for part in parts):
            workspaces = self._workspace, self._second[0]
            return pair.attend((parts[0], parts[1]), tables, visible, sm_scale, workspaces)
        return join_heads(self._part(part, tables, visible, sm_scale) for part in parts)

    def _part(self, part: Part, tables: BatchTables, visible: torch.Tensor | None, sm_scale: float) -> torch.Tensor:
        cache, q_rot, lse, reading = part
        if cache.exact:
            return self._exact.attend([part], tables, visible, sm_scale)
        if visible is None:
            return self(cache, tables, q_rot, sm_scale, lse=lse, reading=reading)
        return cuda.verify(cache, tables, visible, q_rot, sm_scale, workspace=self._workspace, reading=reading, lse=lse)


def break_even_tokens(decode: Decode) -> int:
    """Queries on a long prefix that take as long as dequantizing it.

    Measured on an H200 on prefixes of 2K to 128K tokens.
    """
    return 20 if isinstance(decode, CudaDecode) else 16


def check(setting: Setting, device: str) -> None:
    """Refuse a kernel that a device cannot run, before anything is loaded.

    Raises:
        Int2Error: a GPU kernel is asked for without a GPU.
    """
    if setting != "auto" and device != "cuda":
        raise Int2Error(f"{VARIABLE}={setting} needs --device cuda; unset it")


@dataclass(frozen=True, eq=False)
class DecodeTask:
    """What decode and verification have to do on a rank.

    Args:
        setting: of the variable.
        caches: one layer of every kind of rows; only layouts, windows and device matter. Those with codes are read by
            one kernel.
        page_size: tokens of a page.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values, bfloat16 or float16.
        short_chunks: decode reads the prefixes of short chunks, too (:mod:`oscar_kernels.ragged_extend`).
        drafts: new tokens of a request that are verified at once; 0 without speculation.
        sink_logits: whether layers come with them; decode writes log-sum-exps then.
        readings: what outputs are multiplied by, those of one layer of every kind; None where values are not rotated.
        kv_heads: of a whole layer on this rank; None where no cache is of a part of one.
        pairs: one layer of every kind in two parts with codes: the cache of each, and what its outputs are multiplied
            by.
    """

    setting: Setting
    caches: Sequence[LayerCache]
    page_size: int
    q_heads: int
    dtype: torch.dtype
    short_chunks: bool = False
    drafts: int = 0
    sink_logits: bool = False
    readings: Sequence[SplitMatrix | None] = (None,)
    kv_heads: int | None = None
    pairs: Sequence[Sequence[tuple[LayerCache, SplitMatrix | None]]] = ()

    def heads(self, cache: LayerCache) -> int:
        """Query heads of a cache."""
        return self.q_heads if self.kv_heads is None else self.q_heads // self.kv_heads * cache.kv_heads

    @property
    def coded(self) -> list[LayerCache]:
        """Caches with codes on both sides."""
        return [cache for cache in self.caches if not cache.exact]

    def not_cuda(self, max_batch: int) -> str | None:
        """Why the CUDA kernel does not decode up to ``max_batch`` requests at once; None where it does."""
        if self.setting == "triton":
            return f"{VARIABLE}=triton"
        reasons = (self._unsupported(cache, max_batch) for cache in self.coded or self.caches)
        return next(filter(None, reasons), None)

    def _unsupported(self, cache: LayerCache, max_batch: int) -> str | None:
        return cuda.unsupported(cache, self.page_size, self.heads(cache), self.dtype, max_batch)

    @property
    def cut(self) -> bool:
        """Whether caches with codes are of parts of layers."""
        return self.kv_heads is not None and any(cache.kv_heads < self.kv_heads for cache in self.coded)

    def workspace_numel(self, max_batch: int) -> int:
        """float32 elements that decode, the prefixes of short chunks and verification take turns to use, for up to
        ``max_batch`` requests of a batch; twice as many where the CUDA kernel decodes parts side by side.
        """
        batch = max(max_batch, SHORT_BATCH) if self.short_chunks else max_batch
        by_cuda = self.not_cuda(max_batch) is None
        sizes = []
        for cache in self.caches:
            for requests, new in ((batch, 0), (max_batch, self.drafts)) if self.drafts else ((batch, 0),):
                if by_cuda and not cache.exact:
                    sizes.append(cuda.workspace_numel(cache, self.heads(cache), requests, new))
                else:
                    counters = cuda.MAX_BATCH if by_cuda else 0
                    sizes.append(counters + triton.workspace_numel(cache, self.heads(cache), requests, drafts=new))
        # Either half begins where 16 bytes are read at once.
        return 2 * (-(-max(sizes) // ALIGNED) * ALIGNED) if by_cuda and self.cut else max(sizes)

    def cuda_variants(self) -> Iterator[Variant]:
        """What the CUDA kernel is compiled for: decode steps, and prefixes of short chunks, whose outputs are
        multiplied together with those of the chunks.
        """
        uses = [(self.sink_logits, reading) for reading in self.readings]
        if self.short_chunks:
            # Prefixes are merged with chunks; behind a chunk of one token there is nothing to merge.
            uses += [(True, None), (self.sink_logits, None)]
        for cache, (lse, reading) in product(self.coded or self.caches, uses):
            yield cuda.variant_of(cache, self.page_size, self.heads(cache), self.dtype, lse, reading=reading)

    def prepare_pairs(self, drafts: int = 0) -> None:
        """Compile and load what the CUDA kernel takes for two parts at once, in decode or in verification.

        Raises:
            KernelError: as :func:`oscar_kernels.cuda.pair.prepare`.
        """
        for parts in self.pairs:
            first, second = (
                cuda.variant_of(cache, self.page_size, self.heads(cache), self.dtype, self.sink_logits, drafts, reading)
                for cache, reading in parts
            )
            pair.prepare(first, second, parts[0][0].k_rows.device)


def choose(task: DecodeTask, max_batch: int) -> CudaDecode | TritonDecode:
    """The kernel for a cache on a GPU, compiled and loaded, with a workspace.

    Args:
        task: what it has to do.
        max_batch: requests of a decode batch at most.

    Raises:
        Int2Error: ``cuda`` is asked for and cannot do this, or the kernel cannot be built on this machine.
    """
    reason = task.not_cuda(max_batch)
    numel = task.workspace_numel(max_batch)
    workspace = torch.zeros(numel, dtype=torch.float32, device=task.caches[0].k_rows.device)
    if reason is None:
        try:
            cuda.build(task.cuda_variants())
            task.prepare_pairs()
        except KernelError as error:
            raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
        only = len(task.coded) in (0, len(task.caches))
        beside = "" if only else ", Triton kernel in layers with keys or values of 16 bits"
        logger.info("int2 decode: CUDA kernel%s", beside)
        return CudaDecode(workspace, task.cut)
    if task.setting == "cuda":
        raise Int2Error(f"{VARIABLE}=cuda: {reason}; set it to auto or triton")
    logger.info("int2 decode: Triton kernel, because %s", reason)
    return TritonDecode(workspace)


def prepare_verify(decode: CudaDecode | TritonDecode, task: DecodeTask, max_batch: int) -> None:
    """Compile and load the kernel that attends to several new tokens of a request: of the kind that decodes.

    Args:
        decode: what was chosen for the task, with room for its drafts in the workspace.
        task: what it has to do.
        max_batch: requests of a batch at most.

    Raises:
        Int2Error: the kernel cannot do this, or cannot be built on this machine.
    """
    drafts = task.drafts
    if not isinstance(decode, CudaDecode):
        reasons = (triton.unsupported_verify(cache, task.heads(cache), max_batch, drafts) for cache in task.caches)
        if (reason := next(filter(None, reasons), None)) is not None:
            raise Int2Error(f"{reason}; lower --max-running-requests or --speculative-num-draft-tokens")
        logger.info("int2 verification: Triton kernel, %d tokens of a request", drafts)
        return
    page, dtype = task.page_size, task.dtype
    reasons = (cuda.unsupported(cache, page, task.heads(cache), dtype, max_batch, drafts) for cache in task.coded)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise Int2Error(f"{reason}; set {VARIABLE}=triton, or drop --speculative-algorithm")
    try:
        variants = [
            cuda.variant_of(cache, page, task.heads(cache), dtype, task.sink_logits, drafts, reading)
            for cache, reading in product(task.coded, task.readings)
        ]
        cuda.build(variants)
        task.prepare_pairs(drafts)
    except KernelError as error:
        raise Int2Error(f"{error}; or set {VARIABLE}=triton") from error
    logger.info(
        "int2 verification: CUDA kernel, %d tokens of a request in %d passes",
        drafts,
        max(one.passes for one in variants),
    )
