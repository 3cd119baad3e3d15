"""Verification of drafts: several new tokens per request in one call.

    python benchmark/kernels/bench_verify.py --kernels cuda,triton --heads 32x8,96x8,48x8

Heads are query heads x kv heads x head_dim, 128 where left out: those of Qwen3-8B, GLM-4.7 and MiniMax-M2.

Times of one layer beside those of decoding one token, and of the same tokens as requests of their own.
"""

from __future__ import annotations

import argparse

from bench_decode import in_new_process

from oscar_tools.bench.report import report
from oscar_tools.bench.synthetic import Heads
from oscar_tools.bench.timing import read_bandwidth
from oscar_tools.bench.verify import verify_us

SHAPES = [(1, 100_000), (8, 16_384), (8, 100_000)]
TOKENS = [2, 4, 8, 16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas")
    parser.add_argument("--heads", default="32x8", help="query heads x kv heads x head_dim, separated by commas")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    rows: list[dict[str, object]] = []
    for kernel in args.kernels.split(","):
        for heads in args.heads.split(","):
            for batch, length in SHAPES:
                times = in_new_process(verify_us, kernel, Heads.parse(heads), batch, length, TOKENS)
                rows.append({"kernel": kernel, "heads": heads, "batch": batch, "length": length, **times})
    report("verify", rows, limit, args.json)


if __name__ == "__main__":
    main()
