"""Verification of drafts: several new tokens per request in one call.

    python benchmark/kernels/bench_verify.py --kernels cuda,triton --heads 32x8,96x8,48x8

Heads are query heads x kv heads x head_dim, 128 where left out: those of Qwen3-8B, GLM-4.7 and MiniMax-M2. For those of
Qwen3.6-35B-A3B, by products of four warps and in passes of 16 columns:

    python benchmark/kernels/bench_verify.py --kernels cuda,cuda:passes --heads 16x2x256 --bits k3v2 --tokens 4 \\
        --loads 4x131072,8x131072,32x32768

Times of one layer beside those of decoding one token, and of the same tokens as requests of their own.
"""

from __future__ import annotations

import argparse

from bench_decode import in_new_process

from oscar_tools.bench.report import report
from oscar_tools.bench.synthetic import Heads
from oscar_tools.bench.timing import read_bandwidth
from oscar_tools.bench.verify import verify_us

LOADS = "1x100000,8x16384,8x100000"
TOKENS = "2,4,8,16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas")
    parser.add_argument("--heads", default="32x8", help="query heads x kv heads x head_dim, separated by commas")
    parser.add_argument("--loads", default=LOADS, help="requests x tokens of each, separated by commas")
    parser.add_argument("--tokens", default=TOKENS, help="new tokens of a request, separated by commas")
    parser.add_argument("--bits", default="k2v2", help="widths of keys and values")
    args = parser.parse_args()
    tokens = [int(new) for new in args.tokens.split(",")]
    limit = in_new_process(read_bandwidth)
    rows: list[dict[str, object]] = []
    for kernel in args.kernels.split(","):
        for heads in args.heads.split(","):
            for load in args.loads.split(","):
                batch, length = (int(part) for part in load.split("x"))
                times = in_new_process(verify_us, kernel, Heads.parse(heads), batch, length, tokens, args.bits)
                rows.append(
                    {"kernel": kernel, "heads": heads, "bits": args.bits, "batch": batch, "length": length, **times}
                )
    report("verify", rows, limit, args.json)


if __name__ == "__main__":
    main()
