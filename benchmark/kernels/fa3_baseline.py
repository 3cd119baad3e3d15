"""FlashAttention-3's paged attention as a baseline of the kernel benchmarks, called as SGLang's fa3 backend calls it.

The schedule is computed outside of what is timed, as it is once for all layers of a step. An FP8 cache takes queries in
FP8; to convert them, which SGLang does in every layer, is left out of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import PAGE, Heads, random_pages, shuffled_tables, stock_layers

from sglang_oscar.attention.flash_attention3 import installed as available

__all__ = ["NEEDED", "available", "decode_calls", "prefill_call"]
NEEDED = "sgl_kernel with flash_ops"
"""What it takes."""


def decode_calls(heads: Heads, batch: int, length: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Layers of decode over keys and values of ``dtype``, BF16 or FP8."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    tables, pools = stock_layers(heads, batch, length, dtype)
    q = torch.randn(batch, heads.query, heads.head_dim, device="cuda").bfloat16().to(dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    scale = torch.ones(1, device="cuda").expand(batch, heads.kv) if dtype.itemsize == 1 else None
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

    def call(keys: torch.Tensor, values: torch.Tensor) -> object:
        return flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=tables.kv_lens,
            page_table=tables.page_table,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            k_descale=scale,
            v_descale=scale,
            softmax_scale=heads.sm_scale,
            causal=True,
            scheduler_metadata=schedule,
        )

    return [lambda p=pool: call(*p) for pool in pools]


def prefill_call(heads: Heads, prefix: list[int], chunk: list[int], dtype: torch.dtype) -> Callable[[], object]:
    """Causal attention of a chunk per request over its prefix and itself, over a paged cache of ``dtype``.

    Args:
        heads: of the layer.
        prefix, chunk: cached and new tokens per request.
        dtype: BF16 or FP8, of queries as well, as SGLang computes then.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    tables, slots = shuffled_tables([old + new for old, new in zip(prefix, chunk, strict=True)], PAGE)
    shape = (slots // PAGE, PAGE, heads.kv, heads.head_dim)
    keys, values = random_pages(shape, dtype), random_pages(shape, dtype)
    starts = torch.zeros(len(chunk) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(chunk).cumsum(0)
    q = torch.randn(int(starts[-1]), heads.query, heads.head_dim, device="cuda").bfloat16().to(dtype)
    starts = starts.cuda()
    scale = torch.ones(1, device="cuda").expand(len(chunk), heads.kv) if dtype.itemsize == 1 else None

    def call() -> object:
        return flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=tables.kv_lens,
            page_table=tables.page_table,
            cu_seqlens_q=starts,
            max_seqlen_q=max(chunk),
            k_descale=scale,
            v_descale=scale,
            softmax_scale=heads.sm_scale,
            causal=True,
        )

    return call
