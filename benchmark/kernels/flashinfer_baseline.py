"""FlashInfer's BF16 attention as the baseline of the kernel benchmarks, planned outside of what is timed.

Decode uses tensor cores over pages of 64 tokens. Prefill without a prefix uses the ragged wrapper and prefill over a
prefix the paged one, as SGLang's flashinfer backend does; on Hopper both take FlashInfer's FA3 kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

PAGE = 64
WORKSPACE_BYTES = 512 << 20
Call = Callable[[], object]


@dataclass(frozen=True)
class Heads:
    """Attention geometry of a model; the default is that of Qwen3-8B."""

    q: int = 32
    kv: int = 8
    dim: int = 128


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


def _pages(lengths: list[int], page_size: int) -> _Pages:
    counts = torch.tensor([-(-length // page_size) for length in lengths], dtype=torch.int32)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    total = int(indptr[-1])
    indices = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    return _Pages(indptr.cuda(), indices.cuda(), last.cuda(), total)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def decode_calls(
    lengths: list[int],
    heads: Heads = Heads(),
    page_size: int = PAGE,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Call]:
    """One call per layer: decode of one token per request over a paged 16-bit cache of that layer.

    Args:
        lengths: tokens per request.
        heads: attention geometry.
        page_size: tokens per page.
        layers: number of caches; several keep the inputs out of the L2 cache.
        dtype: of queries and cache.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages = _pages(lengths, page_size)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    wrapper.plan(
        pages.indptr, pages.indices, pages.last_page_len, heads.q, heads.kv, heads.dim, page_size, q_data_type=dtype
    )
    q = _random(len(lengths), heads.q, heads.dim, dtype=dtype)
    pools = [_random(pages.pool, 2, page_size, heads.kv, heads.dim, dtype=dtype) for _ in range(layers)]
    return [lambda pool=pool: wrapper.run(q, pool) for pool in pools]


def prefill_call(
    prefix_lens: list[int],
    chunk_lens: list[int],
    heads: Heads = Heads(),
    page_size: int = PAGE,
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    """Causal attention of a chunk per request over its prefix and itself, all of it in 16 bits.

    Args:
        prefix_lens: cached tokens per request; with 0 everywhere keys and values are ragged, else paged.
        chunk_lens: new tokens per request.
        heads: attention geometry.
        page_size: tokens per page.
        dtype: of queries, keys and values.
    """
    import flashinfer

    starts = torch.zeros(len(chunk_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(chunk_lens).cumsum(0)
    q = _random(int(starts[-1]), heads.q, heads.dim, dtype=dtype)
    starts = starts.cuda()
    if not any(prefix_lens):
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD")
        ragged.plan(starts, starts, heads.q, heads.kv, heads.dim, causal=True, q_data_type=dtype)
        k, v = (_random(q.shape[0], heads.kv, heads.dim, dtype=dtype) for _ in range(2))
        return lambda: ragged.run(q, k, v)
    pages = _pages([prefix + chunk for prefix, chunk in zip(prefix_lens, chunk_lens, strict=True)], page_size)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    paged.plan(
        starts, pages.indptr, pages.indices, pages.last_page_len, heads.q, heads.kv, heads.dim, page_size,
        causal=True, q_data_type=dtype,
    )  # fmt: skip
    pool = _random(pages.pool, 2, page_size, heads.kv, heads.dim, dtype=dtype)
    return lambda: paged.run(q, pool)
