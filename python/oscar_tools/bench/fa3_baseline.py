"""FlashAttention-3's paged attention as a baseline of the kernel benchmarks, called as SGLang's fa3 backend calls it.

The schedule is computed outside of what is timed, as it is once for all layers of a step. An FP8 cache takes queries in
FP8; to convert them, which SGLang does in every layer, is left out of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from oscar_kernels.cache import BatchTables
from oscar_tools.bench.synthetic import PAGE, Heads, random_pages, shuffled_tables, stock_layers
from oscar_tools.bench.timing import device
from sglang_oscar.attention.flash_attention3 import FlashAttention3

NEEDED = "sgl_kernel with flash_ops"
"""What it takes."""


def available(head_dim: int = 128) -> bool:
    """Whether it is here and, on a GPU, compiled for it; nothing is imported."""
    return FlashAttention3.missing(head_dim) is None


def decode_calls(heads: Heads, batch: int, length: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Layers of decode over keys and values of ``dtype``, BF16 or FP8."""
    from sgl_kernel.flash_attn import get_scheduler_metadata

    tables, pools = stock_layers(heads, batch, length, dtype)
    q = torch.randn(batch, heads.query, heads.head_dim, device=device()).bfloat16().to(dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device())
    schedule = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=tables.page_table.shape[1] * PAGE,
        num_heads=heads.query,
        num_heads_k=heads.kv,
        headdim=heads.head_dim,
        cache_seqlens=tables.kv_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=PAGE,
        causal=True,
    )

    scale = _scale(heads, batch, dtype)
    return [partial(_attend, q, *p, heads, tables, starts, 1, scale, scheduler_metadata=schedule) for p in pools]


def prefill_call(heads: Heads, prefix: list[int], chunk: list[int], dtype: torch.dtype) -> Callable[[], object]:
    """Causal attention of a chunk per request over its prefix and itself, over a paged cache of ``dtype``.

    Args:
        heads: of the layer.
        prefix, chunk: cached and new tokens per request.
        dtype: BF16 or FP8, of queries as well, as SGLang computes then.
    """
    tables, slots = shuffled_tables([old + new for old, new in zip(prefix, chunk, strict=True)], PAGE)
    shape = (slots // PAGE, PAGE, heads.kv, heads.head_dim)
    keys, values = random_pages(shape, dtype), random_pages(shape, dtype)
    starts = torch.zeros(len(chunk) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(chunk).cumsum(0)
    q = torch.randn(int(starts[-1]), heads.query, heads.head_dim, device=device()).bfloat16().to(dtype)
    return partial(
        _attend, q, keys, values, heads, tables, starts.to(device()), max(chunk), _scale(heads, len(chunk), dtype)
    )  # fmt: skip


def _scale(heads: Heads, requests: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Of keys and values in FP8, by request and kv head."""
    return torch.ones(1, device=device()).expand(requests, heads.kv) if dtype.itemsize == 1 else None


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: Heads,
    tables: BatchTables,
    starts: torch.Tensor,
    longest: int,
    scale: torch.Tensor | None,
    **more: torch.Tensor,
) -> object:
    """Causal attention of new tokens at the ends of requests, at most ``longest`` of each, over paged caches."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=tables.kv_lens,
        page_table=tables.page_table,
        cu_seqlens_q=starts,
        max_seqlen_q=longest,
        k_descale=scale,
        v_descale=scale,
        softmax_scale=heads.sm_scale,
        causal=True,
        **more,
    )
