"""Store: rotation, quantization and writing of new tokens, with query rotation, Qwen3-8B heads, one layer."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from harness import Layouts, layer_format, layouts_of, random_cache, read_bandwidth, report, time_us

from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.prepared import PreparedLayer, prepare
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store

TOKENS = [1, 8, 32, 64, 128, 256, 512, 2048, 8192]
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WINDOWS = Windows(64, 256, 256)
COPIES = 8
PAGE = 64
FITTED = 0.98, 1.0
"""Gains of the recipe ``plus``: scales and zero points fitted to the codes."""
MOST_CUDA_TOKENS = 512
"""The CUDA kernel is for decode steps."""


def slots_of(tokens: int) -> StoreSlots:
    row = torch.randperm(tokens + 64, device="cuda")[:tokens]
    ring = torch.arange(tokens, device="cuda")
    sink = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
    return StoreSlots(row, torch.where(ring < 64 * WINDOWS.ring, ring, -1), sink)


def prepared(layouts: Layouts, key: SideTransform, value: SideTransform) -> PreparedLayer:
    return prepare(layer_format(layouts, key, value), torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--bits", default="k2v2", help="widths of keys and values, such as k3v2")
    args = parser.parse_args()
    layouts = layouts_of(args.bits, KV_HEADS, HEAD_DIM)
    limit = read_bandwidth()
    rotation = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64))[0].float().cuda()
    keys, values = SideTransform(rotation, clip=0.96), SideTransform(clip=0.92)
    absorbed = prepared(layouts, keys, values)
    online = prepared(layouts, keys, replace(values, matrix=rotation))
    fitted = prepared(layouts, *(replace(side, gain=gain) for side, gain in zip((keys, values), FITTED, strict=True)))
    per_head = prepared(layouts, replace(keys, matrix=rotation.repeat(KV_HEADS, 1, 1)), values)
    rows: list[dict[str, object]] = []
    for tokens in TOKENS:
        heads = Q_HEADS + 2 * KV_HEADS
        caches = [random_cache(tokens + 64, 64, layouts, WINDOWS, seed) for seed in range(COPIES)]
        fused = [torch.randn(tokens, heads, HEAD_DIM, device="cuda").bfloat16() for _ in range(COPIES)]
        split = [x.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1) for x in fused]
        slots = slots_of(tokens)
        q_out = torch.empty(tokens, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        pool = torch.empty(2, tokens + 64, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

        def timed(
            layer: PreparedLayer, with_q: bool = True, caches=caches, split=split, slots=slots, q_out=q_out
        ) -> float:  # fmt: skip
            return time_us([
                lambda c=c, q=q, k=k, v=v: store(c, slots, k, v, layer, q=q if with_q else None, q_out=q_out)
                for c, (q, k, v) in zip(caches, split, strict=True)
            ])  # fmt: skip

        def copy_kv(k: torch.Tensor, v: torch.Tensor, slots=slots, pool=pool) -> None:
            pool[0].index_copy_(0, slots.row, k)
            pool[1].index_copy_(0, slots.row, v)

        def cuda_us(layer: PreparedLayer, caches=caches, split=split, slots=slots, tokens=tokens) -> float | None:
            if tokens > MOST_CUDA_TOKENS or torch.cuda.get_device_capability() != (9, 0):
                return None
            arranged = cuda_store.arrange(layer)
            return time_us([
                lambda c=c, q=q, k=k, v=v: cuda_store.store(c, slots, k, v, arranged, q, PAGE, decoding=True)
                for c, (q, k, v) in zip(caches, split, strict=True)
            ])  # fmt: skip

        us = timed(absorbed)
        moved = tokens * (2 * Q_HEADS + 4 * KV_HEADS) * HEAD_DIM * 2 + tokens * sum(
            layout.row_bytes for layout in layouts
        )
        rows.append({
            "tokens": tokens, "cuda_us": cuda_us(absorbed), "cuda_us_rotating_v": cuda_us(online),
            "cuda_us_fitted_scales": cuda_us(fitted), "cuda_us_per_head": cuda_us(per_head),
            "us": us, "us_rotating_v": timed(online), "us_per_head": timed(per_head),
            "us_without_q": timed(absorbed, with_q=False),
            "GB/s": moved / us / 1e3, "of_limit": moved / us / 1e3 / limit,
            "bf16_index_copy_us": time_us([lambda k=k, v=v: copy_kv(k, v) for _, k, v in split]),
        })  # fmt: skip
    report("store", rows, limit, args.json)


if __name__ == "__main__":
    main()
