"""FlashInfer's BF16 attention as the baseline of the kernel benchmarks, planned outside of what is timed.

Without a prefix it is the ragged wrapper, over a prefix the paged one, as in SGLang's flashinfer backend; on Hopper
both take FlashInfer's FA3 kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from oscar_tools.bench.synthetic import PAGE, QWEN3_8B
from oscar_tools.bench.timing import device

WORKSPACE_BYTES = 512 << 20
Call = Callable[[], object]
Q_HEADS, KV_HEADS, HEAD_DIM = QWEN3_8B
DTYPE = torch.bfloat16


def available() -> bool:
    """Whether FlashInfer is installed."""
    return importlib.util.find_spec("flashinfer") is not None


@dataclass(frozen=True)
class _Pages:
    """A shuffled page table in FlashInfer's form and the number of pages of the pool."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    pool: int


def _pages(lengths: list[int]) -> _Pages:
    counts = torch.tensor([-(-length // PAGE) for length in lengths], dtype=torch.int32)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    total = int(indptr[-1])
    indices = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    return _Pages(indptr.to(device()), indices.to(device()), last.to(device()), total)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device(), dtype=DTYPE)


def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device())


def prefill_call(prefix_lens: list[int], chunk_lens: list[int]) -> Call:
    """Causal attention of a chunk per request over its prefix and itself, all of it in 16 bits.

    Args:
        prefix_lens: cached tokens per request; with 0 everywhere keys and values are ragged, else paged.
        chunk_lens: new tokens per request.
    """
    import flashinfer

    starts = torch.zeros(len(chunk_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(chunk_lens).cumsum(0)
    q = _random(int(starts[-1]), Q_HEADS, HEAD_DIM)
    starts = starts.to(device())
    if not any(prefix_lens):
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD")
        ragged.plan(starts, starts, Q_HEADS, KV_HEADS, HEAD_DIM, causal=True, q_data_type=DTYPE)
        k, v = (_random(q.shape[0], KV_HEADS, HEAD_DIM) for _ in range(2))
        return lambda: ragged.run(q, k, v)
    pages = _pages([prefix + chunk for prefix, chunk in zip(prefix_lens, chunk_lens, strict=True)])
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    paged.plan(
        starts, pages.indptr, pages.indices, pages.last_page_len, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE,
        causal=True, q_data_type=DTYPE,
    )  # fmt: skip
    pool = _random(pages.pool, 2, PAGE, KV_HEADS, HEAD_DIM)
    return lambda: paged.run(q, pool)
