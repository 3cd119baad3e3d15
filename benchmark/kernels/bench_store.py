"""Store: rotation, quantization and writing of new tokens, with query rotation, one layer."""

from __future__ import annotations

import argparse
from dataclasses import replace

from oscar_kernels.transform import SideTransform
from oscar_tools.bench.report import report
from oscar_tools.bench.store import StoreCase, prepared
from oscar_tools.bench.synthetic import Heads, layouts_of, rotation_of
from oscar_tools.bench.timing import read_bandwidth

TOKENS = [1, 8, 32, 64, 128, 256, 512, 2048, 8192]
FITTED = 0.98, 1.0
"""Gains of the recipe ``plus``: scales and zero points fitted to the codes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument(
        "--bits", default="k2v2", help="widths of keys and values, such as k3v2; k2bv2s: codebook, symmetric"
    )
    parser.add_argument("--heads", default="32x8x128", help="query heads x kv heads x head_dim")
    args = parser.parse_args()
    heads = Heads.parse(args.heads)
    layouts = layouts_of(args.bits, heads.kv, heads.head_dim)
    limit = read_bandwidth()
    rotation = rotation_of(heads.head_dim)
    keys, values = SideTransform(rotation, clip=0.96), SideTransform(clip=0.92)
    keys_only = prepared(layouts, keys, values)
    online = prepared(layouts, keys, replace(values, matrix=rotation))
    fitted = prepared(layouts, *(replace(side, gain=gain) for side, gain in zip((keys, values), FITTED, strict=True)))
    per_head = prepared(layouts, replace(keys, matrix=rotation.repeat(heads.kv, 1, 1)), values)
    rows: list[dict[str, object]] = []
    for tokens in TOKENS:
        case = StoreCase(tokens, layouts, heads)
        us = case.triton_us(keys_only)
        rows.append({
            "tokens": tokens, "cuda_us": case.cuda_us(keys_only), "cuda_us_rotating_v": case.cuda_us(online),
            "cuda_us_fitted_scales": case.cuda_us(fitted), "cuda_us_per_head": case.cuda_us(per_head),
            "us": us, "us_rotating_v": case.triton_us(online), "us_per_head": case.triton_us(per_head),
            "us_without_q": case.triton_us(keys_only, with_q=False),
            "GB/s": case.moved_bytes / us / 1e3, "of_limit": case.moved_bytes / us / 1e3 / limit,
            "bf16_index_copy_us": case.copy_us(),
            "prompt_us": case.prompt_us(keys_only), "prompt_us_without_q": case.prompt_us(keys_only, with_q=False),
            "prompt_us_rotating_v": case.prompt_us(online), "prompt_us_per_head": case.prompt_us(per_head),
            "prompt_us_rotating_v_without_q": case.prompt_us(online, with_q=False),
            "us_rotating_v_without_q": case.triton_us(online, with_q=False),
        })  # fmt: skip
    report("store", rows, limit, args.json)


if __name__ == "__main__":
    main()
