"""Extend: one layer's attention and storing of a chunk, INT2 cache against BF16 and FP8, Qwen3-8B heads.

``us`` is attention to chunk and prefix apart, query rotation, dequantization and merging included; ``store_us`` is
rotation, quantization and storing of the chunk. ``joined_us`` is all of that for a batch whose prefixes and chunks are
attended to at once, which a server then does; null for others. The baseline is the faster of FlashInfer's and
FlashAttention-3's BF16 prefill (PyTorch's where neither is installed) and the plain copy of keys and values into a BF16
cache. ``overhead`` compares what a server does. ``fa3_fp8_us`` is FlashAttention-3's prefill in FP8, the copy left out.
"""

from __future__ import annotations

import argparse

import torch

from oscar_tools.bench.extend import BACKENDS, extend_row, prefill_us, served, stock_names
from oscar_tools.bench.report import report
from oscar_tools.bench.timing import read_bandwidth

SHAPES = [
    (1, 0, 8192), (8, 0, 1024), (1, 8192, 8192), (1, 32_768, 8192), (1, 32_768, 2048), (1, 131_072, 2048),
    (1, 32_768, 256), (1, 2048, 128), (1, 8064, 128), (8, 8192, 256), (8, 8192, 64), (1, 131_072, 32),
    (1, 131_072, 16), (1, 131_072, 4), (8, 8192, 32), (8, 8192, 16), (8, 8192, 4), (64, 8192, 4), (64, 8192, 1),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of INT2")
    args = parser.parse_args()
    limit, kernels = read_bandwidth(), served(args.backend)
    rows: list[dict[str, object]] = []
    for batch, prefix, chunk in SHAPES:
        row = extend_row((batch, prefix, chunk), kernels)
        torch.cuda.empty_cache()
        stock = {}
        for name in stock_names():
            stock[name] = prefill_us(name, batch, prefix, chunk)
            torch.cuda.empty_cache()
        baseline = min((name for name in stock if not name.endswith("fp8")), key=stock.__getitem__)
        whole, copied = row["joined_us"] or row["us"] + row["store_us"], stock[baseline] + row["copy_us"]
        rows.append({
            "batch": batch, "prefix": prefix, "chunk": chunk, **row, "baseline": baseline,
            "baseline_us": stock[baseline], "speedup": stock[baseline] / row["us"], "overhead": whole / copied - 1,
            **{f"{name}_us": took for name, took in stock.items()},
        })  # fmt: skip
    report("extend", rows, limit, args.json)


if __name__ == "__main__":
    main()
