"""Decode attention: quantized cache against BF16 and FP8.

    python benchmark/kernels/bench_decode.py --kernels cuda,cuda:k3v2,cuda:k4v2,triton
    python benchmark/kernels/bench_decode.py --heads 16x2x256,32x2x256 --shapes 8x131072,32x32768

A kernel reads codes of 2 bits unless widths of keys and values follow its name. Heads are query heads x kv heads x
head_dim, by default those of Qwen3-8B; shapes are requests x tokens of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
from collections.abc import Callable
from typing import TypeVar

import torch
from harness import (
    COLD_BYTES,
    Heads,
    Layouts,
    layouts_of,
    random_cache,
    read_bandwidth,
    report,
    shuffled_tables,
    time_us,
)

from oscar_kernels.cache import LayerCache, Windows
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import decode as triton_decode

SHAPES = "1x100000,8x32768,8x100000,32x8192,32x32768,32x100000,128x8192"
PAGE = 64
WINDOWS = Windows(64, 256, 256)
T = TypeVar("T")
KERNELS = {"cuda": cuda_decode, "triton": triton_decode}
BASELINES = {"flashinfer": torch.bfloat16, "flashinfer_fp8": torch.float8_e4m3fn}
"""FlashInfer's caches."""


def rows_of(kernel: str, heads: Heads) -> Layouts:
    """What a kernel reads."""
    return layouts_of(kernel.partition(":")[2] or "k2v2", heads.kv, heads.head_dim)


def read_bytes(batch: int, length: int, layouts: Layouts) -> int:
    """Bytes of cache that one layer's decode has to read."""
    window = WINDOWS.sink + WINDOWS.recent
    rows = sum(layout.row_bytes for layout in layouts)
    exact = 2 * layouts[0].kv_heads * layouts[0].head_dim * 2
    return batch * ((length - window) * rows + window * exact)


def layers_of(size: int) -> int:
    """Calls in a graph: as the layers of a model follow each other, and more than the L2 cache holds."""
    return min(max(4, -(-COLD_BYTES // size)), 8)


def make_workspace(kernel: str, cache: LayerCache, q_heads: int, batch: int) -> torch.Tensor:
    """What a kernel needs besides its inputs, shared by all layers."""
    if kernel.startswith("cuda"):
        return cuda_decode.make_workspace(cache, q_heads, batch)
    return torch.empty(triton_decode.workspace_numel(cache, q_heads, batch), device="cuda")


def int2_us(kernel: str, heads: Heads, batch: int, length: int) -> float:
    """Microseconds of one layer; every layer of a graph has a cache of its own."""
    module, layouts = KERNELS[kernel.partition(":")[0]], rows_of(kernel, heads)
    layers = layers_of(read_bytes(batch, length, layouts))
    tables, slots = shuffled_tables([length] * batch, PAGE)
    caches = [random_cache(slots, batch, layouts, WINDOWS, seed) for seed in range(layers)]
    q = torch.randn(batch, heads.query, heads.head_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    workspace = make_workspace(kernel, caches[0], heads.query, batch)
    return time_us([lambda c=cache: module.decode(c, tables, q, heads.sm_scale, out, workspace) for cache in caches])


def flashinfer_calls(heads: Heads, batch: int, length: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Layers of FlashInfer's paged decode: BF16 queries, a cache of ``dtype``."""
    import flashinfer

    tables, slots = shuffled_tables([length] * batch, PAGE)
    shape = (slots // PAGE, 2, PAGE, heads.kv, heads.head_dim)
    layers = layers_of(dtype.itemsize * math.prod(shape))
    pools = [random_pages(shape, dtype) for _ in range(layers)]
    q = torch.randn(batch, heads.query, heads.head_dim, device="cuda").bfloat16()
    pages = -(-length // PAGE)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((batch,), (length - 1) % PAGE + 1, dtype=torch.int32, device="cuda")
    buffer = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr,
        tables.page_table.flatten(),
        last,
        *heads,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=dtype,
    )
    return [lambda p=pool: wrapper.run(q, p) for pool in pools]


def random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages of a stock cache; converted some at a time, because a copy in BF16 might not fit beside it."""
    pages = torch.empty(shape, device="cuda", dtype=dtype)
    for some in pages.split(4096):
        some.copy_(torch.randn(some.shape, device="cuda", dtype=torch.bfloat16))
    return pages


def sdpa_calls(heads: Heads, batch: int, length: int) -> list[Callable[[], object]]:
    """One layer of PyTorch's BF16 attention over contiguous keys and values."""
    shape = (batch, heads.kv, length, heads.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads.query, 1, heads.head_dim, device="cuda", dtype=torch.bfloat16)
    return [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)]


def measure(kernel: str, heads: Heads, shapes: list[tuple[int, int]]) -> list[float]:
    """Microseconds of one layer for every shape: an INT2 kernel's, or the baseline's."""
    times = []
    for shape in shapes:
        if kernel.partition(":")[0] in KERNELS:
            times.append(int2_us(kernel, heads, *shape))
        else:
            of = (
                flashinfer_calls(heads, *shape, BASELINES[kernel]) if kernel in BASELINES else sdpa_calls(heads, *shape)
            )
            times.append(time_us(of))
            del of
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
    heads: Heads, shapes: list[tuple[int, int]], kernels: list[str], baselines: list[str], limit: float
) -> list[dict[str, object]]:
    """A row of the report for every shape; ``limit`` is the bandwidth in GB/s."""
    times = {name: in_new_process(measure, name, heads, shapes) for name in [*kernels, *baselines]}
    rows = []
    for i, (batch, length) in enumerate(shapes):
        in_two_bits = read_bytes(batch, length, rows_of("", heads))
        row: dict[str, object] = {"heads": "x".join(map(str, heads)), "batch": batch, "length": length}
        row["limit_us"] = in_two_bits / limit / 1e3
        for kernel in kernels:
            size = read_bytes(batch, length, rows_of(kernel, heads))
            row[f"{kernel}_us"] = times[kernel][i]
            row[f"{kernel}_of_limit"] = size / times[kernel][i] / 1e3 / limit
        for baseline in baselines[:1]:
            row |= {"baseline": baseline, "baseline_us": times[baseline][i]}
            row |= {f"{kernel}_speedup": times[baseline][i] / times[kernel][i] for kernel in kernels}
        rows.append(row | {f"{name}_us": times[name][i] for name in baselines[1:]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas, such as cuda,cuda:k3v2")
    parser.add_argument("--no-baseline", action="store_true", help="time our kernels only")
    parser.add_argument("--heads", default="32x8x128", help="query heads x kv heads x head_dim, separated by commas")
    parser.add_argument("--shapes", default=SHAPES, help="requests x tokens, separated by commas")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    stock = list(BASELINES) if importlib.util.find_spec("flashinfer") else ["torch"]
    kernels, baselines = args.kernels.split(","), [] if args.no_baseline else stock
    shapes = [
        (int(batch), int(length)) for batch, _, length in (shape.partition("x") for shape in args.shapes.split(","))
    ]
    rows = [
        row
        for heads in args.heads.split(",")
        for row in rows_for(Heads.parse(heads), shapes, kernels, baselines, limit)
    ]
    report("decode", rows, limit, args.json)


if __name__ == "__main__":
    main()
