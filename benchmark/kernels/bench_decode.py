"""Decode attention: quantized cache against BF16 and FP8, Qwen3-8B heads (32 query heads, 8 kv heads, head_dim 128).

    python benchmark/kernels/bench_decode.py --kernels cuda,cuda:k3v2,cuda:k4v2,triton

A kernel reads codes of 2 bits unless widths of keys and values follow its name.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
from collections.abc import Callable
from typing import TypeVar

import torch
from harness import COLD_BYTES, Layouts, layouts_of, random_cache, read_bandwidth, report, shuffled_tables, time_us

from oscar_kernels.cache import LayerCache, Windows
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import decode as triton_decode

SHAPES = [(1, 100_000), (8, 32_768), (8, 100_000), (32, 8192), (32, 32_768), (32, 100_000), (128, 8192)]
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
WINDOWS = Windows(64, 256, 256)
SM_SCALE = HEAD_DIM**-0.5
T = TypeVar("T")
KERNELS = {"cuda": cuda_decode, "triton": triton_decode}
BASELINES = {"flashinfer": torch.bfloat16, "flashinfer_fp8": torch.float8_e4m3fn}
"""FlashInfer's caches."""


def rows_of(kernel: str) -> Layouts:
    """What a kernel reads."""
    return layouts_of(kernel.partition(":")[2] or "k2v2", KV_HEADS, HEAD_DIM)


def read_bytes(batch: int, length: int, layouts: Layouts) -> int:
    """Bytes of cache that one layer's decode has to read."""
    window = WINDOWS.sink + WINDOWS.recent
    rows = sum(layout.row_bytes for layout in layouts)
    return batch * ((length - window) * rows + window * 2 * KV_HEADS * HEAD_DIM * 2)


def layers_of(size: int) -> int:
    """Calls in a graph: as the layers of a model follow each other, and more than the L2 cache holds."""
    return min(max(4, -(-COLD_BYTES // size)), 8)


def make_workspace(kernel: str, cache: LayerCache, batch: int) -> torch.Tensor:
    """What a kernel needs besides its inputs, shared by all layers."""
    if kernel.startswith("cuda"):
        return cuda_decode.make_workspace(cache, Q_HEADS, batch)
    return torch.empty(triton_decode.workspace_numel(cache, Q_HEADS, batch), device="cuda")


def int2_us(kernel: str, batch: int, length: int) -> float:
    """Microseconds of one layer; every layer of a graph has a cache of its own."""
    module, layouts = KERNELS[kernel.partition(":")[0]], rows_of(kernel)
    layers = layers_of(read_bytes(batch, length, layouts))
    tables, slots = shuffled_tables([length] * batch, PAGE)
    caches = [random_cache(slots, batch, layouts, WINDOWS, seed) for seed in range(layers)]
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    workspace = make_workspace(kernel, caches[0], batch)
    return time_us([lambda c=cache: module.decode(c, tables, q, SM_SCALE, out, workspace) for cache in caches])


def flashinfer_calls(batch: int, length: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Layers of FlashInfer's paged decode: BF16 queries, a cache of ``dtype``."""
    import flashinfer

    tables, slots = shuffled_tables([length] * batch, PAGE)
    shape = (slots // PAGE, 2, PAGE, KV_HEADS, HEAD_DIM)
    layers = layers_of(dtype.itemsize * math.prod(shape))
    pools = [random_pages(shape, dtype) for _ in range(layers)]
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device="cuda").bfloat16()
    pages = -(-length // PAGE)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((batch,), (length - 1) % PAGE + 1, dtype=torch.int32, device="cuda")
    buffer = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr,
        tables.page_table.flatten(),
        last,
        Q_HEADS,
        KV_HEADS,
        HEAD_DIM,
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


def sdpa_calls(batch: int, length: int) -> list[Callable[[], object]]:
    """One layer of PyTorch's BF16 attention over contiguous keys and values."""
    k, v = (torch.randn(batch, KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, Q_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)]


def measure(kernel: str) -> list[float]:
    """Microseconds of one layer for every shape: an INT2 kernel's, or the baseline's."""
    times = []
    for shape in SHAPES:
        if kernel.partition(":")[0] in KERNELS:
            times.append(int2_us(kernel, *shape))
        else:
            calls = flashinfer_calls(*shape, BASELINES[kernel]) if kernel in BASELINES else sdpa_calls(*shape)
            times.append(time_us(calls))
            del calls
        torch.cuda.empty_cache()
    return times


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """What ``function`` returns, called in a process of its own.

    Memory that has been allocated and given back before is handed out again in pieces. What lies in such pieces is read
    up to 7% slower, and a server allocates its pools once.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas, such as cuda,cuda:k3v2")
    parser.add_argument("--no-baseline", action="store_true", help="time our kernels only")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    kernels = args.kernels.split(",")
    stock = list(BASELINES) if importlib.util.find_spec("flashinfer") else ["torch"]
    baselines = [] if args.no_baseline else stock
    times = {name: in_new_process(measure, name) for name in [*kernels, *baselines]}
    rows: list[dict[str, object]] = []
    for i, (batch, length) in enumerate(SHAPES):
        in_two_bits = read_bytes(batch, length, rows_of(""))
        row: dict[str, object] = {"batch": batch, "length": length, "limit_us": in_two_bits / limit / 1e3}
        for kernel in kernels:
            size = read_bytes(batch, length, rows_of(kernel))
            row[f"{kernel}_us"] = times[kernel][i]
            row[f"{kernel}_of_limit"] = size / times[kernel][i] / 1e3 / limit
        for baseline in baselines[:1]:
            row |= {"baseline": baseline, "baseline_us": times[baseline][i]}
            row |= {f"{kernel}_speedup": times[baseline][i] / times[kernel][i] for kernel in kernels}
        row |= {f"{name}_us": times[name][i] for name in baselines[1:]}
        rows.append(row)
    report("decode", rows, limit, args.json)


if __name__ == "__main__":
    main()
