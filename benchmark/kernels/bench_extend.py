"""Extend: chunk attention over an INT2 prefix against PyTorch's BF16 attention, Qwen3-8B heads, one layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from harness import random_cache, read_bandwidth, report, shuffled_tables, time_us

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from oscar_kernels.triton.extend import extend

SHAPES = [(1, 0, 8192), (1, 8192, 8192), (1, 32_768, 2048), (1, 131_072, 2048), (8, 8192, 256)]
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
LAYOUT = RowLayout(KV_HEADS, HEAD_DIM, 128, torch.bfloat16)
SM_SCALE = HEAD_DIM**-0.5


def extend_call(batch: int, prefix: int, chunk: int) -> Callable[[], object]:
    tables, slots = shuffled_tables([prefix] * batch, PAGE)
    cache = random_cache(slots, batch, LAYOUT, Windows(64, 256, 256))
    tokens = batch * chunk
    q, q_rot = (torch.randn(tokens, Q_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * chunk
    out = torch.empty_like(q)
    return lambda: extend(cache, tables, q, k, v, indptr, q_rot, SM_SCALE, out)


def sdpa_call(batch: int, prefix: int, chunk: int) -> Callable[[], object]:
    """Causal over the chunk alone, else over prefix and chunk with the chunk at the end."""
    keys = prefix + chunk
    q = torch.randn(batch, Q_HEADS, chunk, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, KV_HEADS, keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention
    if prefix == 0:
        return lambda: attention(q, k, v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(chunk, keys)
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
    return lambda: attention(q, k, v, attn_mask=mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    limit = read_bandwidth()
    rows: list[dict[str, object]] = []
    for batch, prefix, chunk in SHAPES:
        us = time_us([extend_call(batch, prefix, chunk)], replays=7)
        torch.cuda.empty_cache()
        try:
            baseline = time_us([sdpa_call(batch, prefix, chunk)], replays=7)
        except (RuntimeError, ValueError):  # no fused kernel for this mask, or no room for it
            baseline = float("nan")
        torch.cuda.empty_cache()
        flops = 4 * batch * Q_HEADS * HEAD_DIM * chunk * (prefix + chunk / 2)
        rows.append({
            "batch": batch, "prefix": prefix, "chunk": chunk, "us": us, "TFLOP/s": flops / us / 1e6,
            "baseline": "torch", "baseline_us": baseline, "speedup": baseline / us,
        })  # fmt: skip
    report("extend", rows, limit, args.json)


if __name__ == "__main__":
    main()
