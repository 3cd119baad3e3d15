"""XQA's paged decode as a baseline of the kernel benchmarks, called as SGLang's trtllm_mha backend calls it on Hopper.

FlashInfer brings its sources and compiles them at the first call. An FP8 cache takes queries in BF16, which the kernel
converts; it computes in FP8 then.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from oscar_tools.bench.synthetic import PAGE, Heads, stock_layers
from oscar_tools.bench.timing import device

NEEDED = "flashinfer with xqa"
"""What it takes."""
WORKSPACE = 512 << 20
"""Bytes, as SGLang gives it: counters, which are zero before the first call, and partial results."""


def available() -> bool:
    """Whether FlashInfer is here and has it; nothing is imported."""
    spec = importlib.util.find_spec("flashinfer")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "xqa.py").exists()


def decode_calls(heads: Heads, batch: int, length: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Layers of decode over keys and values of ``dtype``, BF16 or FP8."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    tables, pools = stock_layers(heads, batch, length, dtype)
    q = torch.randn(batch, heads.query, heads.head_dim, device=device()).bfloat16()
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device())

    def call(cache: tuple[torch.Tensor, ...]) -> object:
        return trtllm_batch_decode_with_kv_cache(
            query=q,
            kv_cache=cache,
            workspace_buffer=workspace,
            block_tables=tables.page_table,
            seq_lens=tables.kv_lens,
            max_seq_len=tables.page_table.shape[1] * PAGE,
            bmm1_scale=heads.sm_scale,
            bmm2_scale=1.0,
            out_dtype=q.dtype,
        )

    # Pages hold tokens of all heads; the kernel is told of them head by head.
    by_head = [tuple(side.permute(0, 2, 1, 3) for side in pool) for pool in pools]
    return [partial(call, pool) for pool in by_head]
