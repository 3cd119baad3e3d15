"""Timing by CUDA graph replay, a read-bandwidth probe, synthetic caches and the report of the kernel benchmarks."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, LayerCache, Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import RowLayout
from oscar_kernels.transform import SideTransform

COLD_BYTES = 400 << 20
"""Inputs of one graph replay together: several times the L2 cache of any current GPU."""


def time_us(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds per call over replays of one CUDA graph of all ``calls``, which work on different data."""
    for call in calls[:1] * 2:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3 / len(calls)


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + first + step * BLOCK + tl.arange(0, BLOCK))
    total = tl.sum(total, 0)
    # Never true, but the compiler cannot know: the loads stay.
    if total == 0x7FFFFFF1:
        tl.store(out_ptr, total)


def read_bandwidth() -> float:
    """GB/s of reading 2 GiB of device memory once: the limit that the kernels are compared with."""
    x = torch.randint(0, 1 << 20, (1 << 29,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    best = min(
        time_us([lambda b=block, s=steps: _read_kernel[(x.numel() // (b * s),)](x, out, BLOCK=b, STEPS=s, num_warps=8)])
        for block, steps in ((8192, 4), (8192, 16), (4096, 8))
    )
    return x.numel() * 4 / best / 1e3


def layer_format(layout: RowLayout, key: SideTransform, value: SideTransform) -> LayerFormat:
    """Both sides in rows of one layout."""
    sides = (SideFormat(layout.group_size, layout.scale_dtype, layout.bits, of) for of in (key, value))
    return LayerFormat(layout.kv_heads, layout.head_dim, *sides)


def random_cache(
    slots: int, requests: int, layout: RowLayout, windows: Windows, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> LayerCache:
    """Random codes, scales around 0.5 and zero points around 1.5."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def rows() -> torch.Tensor:
        data = torch.empty(slots, layout.row_bytes, dtype=torch.uint8, device="cuda")
        data.random_(generator=generator)
        params = torch.rand(
            slots, layout.kv_heads * layout.groups, 2, device="cuda", generator=generator, dtype=torch.bfloat16
        )
        params = params * 0.5 + torch.tensor([0.25, 1.25], device="cuda", dtype=torch.bfloat16)
        data[:, layout.params_offset :] = params.to(layout.scale_dtype).flatten(1).view(torch.uint8)
        return data

    def window(size: int) -> torch.Tensor:
        shape = (requests + 1, size, layout.kv_heads, layout.head_dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    sides = (window(windows.sink), window(windows.sink), window(windows.ring), window(windows.ring))
    return LayerCache(layout, layout, windows, rows(), rows(), *sides)


def shuffled_tables(lengths: list[int], page_size: int, seed: int = 0) -> tuple[BatchTables, int]:
    """Tables of requests on random pages, and the number of slots that the pages take (page 0 is a dummy)."""
    counts = [-(-length // page_size) for length in lengths]
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
    pages = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    used = 0
    for request, count in enumerate(counts):
        pages[request, :count] = order[used : used + count]
        used += count
    owner = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device="cuda")
    start = torch.zeros_like(owner)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tables = BatchTables(page_size, pages.cuda(), kv_lens, owner, start, owner.clone())
    return tables, (sum(counts) + 1) * page_size


def report(name: str, rows: list[dict[str, object]], limit: float, path: str | None) -> None:
    """Print a table and write it with what it was measured on."""
    columns = list(rows[0])
    cells = [[f"{row[c]:.2f}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print(f"read bandwidth measured: {limit:.0f} GB/s", flush=True)
    result = {
        "benchmark": name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
        "read_bandwidth_gb_s": round(limit, 1),
        "rows": [{c: round(v, 3) if isinstance(v, float) else v for c, v in row.items()} for row in rows],
    }
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
