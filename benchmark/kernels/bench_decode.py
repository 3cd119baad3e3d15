"""Decode attention: quantized cache against BF16 and FP8.

    python benchmark/kernels/bench_decode.py --kernels cuda,cuda:k3v2,cuda:k4v2,triton
    python benchmark/kernels/bench_decode.py --heads 16x2x256,32x2x256 --shapes 8x131072,32x32768
    python benchmark/kernels/bench_decode.py --heads 28x4x128,12x2x128 --kernels cuda,cuda:k2bv2s --no-baseline
    python benchmark/kernels/bench_decode.py --heads 12x2x128 --kernels cuda:k3v2,cuda:k3v2+k2bv2s --no-baseline
    python benchmark/kernels/bench_decode.py --baselines flashinfer,flashinfer_fp8,fa3,fa3_fp8

A kernel reads codes of 2 bits unless widths of keys and values follow its name; s behind a width is coding symmetric, b
codebook. With a plus between widths equal parts of the kv heads have one each; one launch decodes two. Heads are
query heads x kv heads x head_dim, by default those of Qwen3-8B; shapes are requests x tokens of each. Speedups are over
the first baseline; those over another carry its name.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from typing import TypeVar

import torch

from oscar_tools.bench import decode_baselines
from oscar_tools.bench.decode import KERNELS, decode_us, kernel_bytes
from oscar_tools.bench.report import report
from oscar_tools.bench.synthetic import Heads
from oscar_tools.bench.timing import read_bandwidth, time_us

SHAPES = "1x100000,8x32768,8x100000,32x8192,32x32768,32x100000,128x8192"
T = TypeVar("T")


def measure(kernel: str, heads: Heads, shapes: list[tuple[int, int]]) -> list[float]:
    """Microseconds of one layer for every shape: an INT2 kernel's, or the baseline's."""
    times = []
    for shape in shapes:
        if kernel.partition(":")[0] in KERNELS:
            times.append(decode_us(kernel, heads, *shape))
        else:
            times.append(time_us(decode_baselines.calls_of(kernel, heads, *shape)))
        torch.cuda.empty_cache()
    return times


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """What ``function`` returns, called in a process of its own.

    Memory that has been allocated and given back before is handed out again in pieces. What lies in such pieces is read
    up to 7% slower, and a server allocates its pools once.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def rows_for(
    heads: Heads, shapes: list[tuple[int, int]], kernels: list[str], baselines: list[str], limit: float, repeats: int
) -> list[dict[str, object]]:
    """A row of the report for every shape: medians of repetitions, each in processes of its own, and of each kernel how
    far they lie apart, relative to the median; ``limit`` is the bandwidth in GB/s."""
    names = [*kernels, *baselines]
    runs = [{name: in_new_process(measure, name, heads, shapes) for name in names} for _ in range(repeats)]
    took = {name: list(zip(*(run[name] for run in runs), strict=True)) for name in names}
    times = {name: [statistics.median(of_shape) for of_shape in took[name]] for name in names}
    rows = []
    for i, (batch, length) in enumerate(shapes):
        in_two_bits = kernel_bytes("", heads, batch, length)
        row: dict[str, object] = {"heads": "x".join(map(str, heads)), "batch": batch, "length": length}
        row["limit_us"] = in_two_bits / limit / 1e3
        for kernel in kernels:
            size = kernel_bytes(kernel, heads, batch, length)
            row[f"{kernel}_us"] = times[kernel][i]
            row[f"{kernel}_of_limit"] = size / times[kernel][i] / 1e3 / limit
        for baseline in baselines[:1]:
            row |= {"baseline": baseline, "baseline_us": times[baseline][i]}
            row |= {f"{kernel}_speedup": times[baseline][i] / times[kernel][i] for kernel in kernels}
        for baseline in baselines[1:]:
            row[f"{baseline}_us"] = times[baseline][i]
            row |= {f"{kernel}_speedup_{baseline}": times[baseline][i] / times[kernel][i] for kernel in kernels}
        if repeats > 1:
            row |= {f"{name}_spread": (max(took[name][i]) - min(took[name][i])) / times[name][i] for name in names}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas, such as cuda,cuda:k3v2")
    stock = parser.add_mutually_exclusive_group()
    stock.add_argument("--no-baseline", action="store_true", help="time our kernels only")
    stock.add_argument("--baselines", help=f"of {', '.join(decode_baselines.NAMES)}, separated by commas")
    parser.add_argument("--heads", default="32x8x128", help="query heads x kv heads x head_dim, separated by commas")
    parser.add_argument("--shapes", default=SHAPES, help="requests x tokens, separated by commas")
    parser.add_argument("--repeats", type=int, default=1, help="how often everything is measured")
    args = parser.parse_args()
    try:
        asked = decode_baselines.chosen(args.baselines) if args.baselines else decode_baselines.default()
    except ValueError as error:
        parser.error(str(error))
    kernels, baselines = args.kernels.split(","), [] if args.no_baseline else asked
    limit = in_new_process(read_bandwidth)
    shapes = [
        (int(batch), int(length)) for batch, _, length in (shape.partition("x") for shape in args.shapes.split(","))
    ]
    rows = [
        row
        for heads in args.heads.split(",")
        for row in rows_for(Heads.parse(heads), shapes, kernels, baselines, limit, args.repeats)
    ]
    report("decode", rows, limit, args.json)


if __name__ == "__main__":
    main()
