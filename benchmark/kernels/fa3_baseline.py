"""FlashAttention-3's paged decode as a baseline of the kernel benchmarks, called as SGLang's fa3 backend calls it.

The schedule is computed outside of what is timed, as it is once for all layers of a step. An FP8 cache takes queries in
FP8; to convert them, which SGLang does in every layer, is left out of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import PAGE, Heads, stock_layers

from sglang_oscar.attention.flash_attention3 import installed as available

__all__ = ["NEEDED", "available", "decode_calls"]
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
