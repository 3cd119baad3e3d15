"""Timing by CUDA graph replay, a read-bandwidth probe, synthetic caches and the report of the kernel benchmarks."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oscar_kernels.cache import BatchTables, LayerCache, Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import RowLayout
from oscar_kernels.transform import SideTransform
from oscar_rotation.fit.bit_goal import BitGoal

PAGE = 64
"""Tokens of a page of every cache."""
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


def layers_of(size: int) -> int:
    """Calls in a graph: as the layers of a model follow each other, and more than the L2 cache holds.

    Args:
        size: bytes that one call reads.
    """
    return min(max(4, -(-COLD_BYTES // size)), 8)


def random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages of a stock cache; converted some at a time, because a copy in BF16 might not fit beside it."""
    pages = torch.empty(shape, device="cuda", dtype=dtype)
    for some in pages.split(4096):
        some.copy_(torch.randn(some.shape, device="cuda", dtype=torch.bfloat16))
    return pages


class Heads(NamedTuple):
    """What one layer's attention of a model looks like on one GPU."""

    query: int
    kv: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Query heads, kv heads and head_dim with an x between them; head_dim is 128 where it is left out."""
        query, kv, *rest = (int(part) for part in text.split("x"))
        return cls(query, kv, *rest or [128])

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by."""
        return float(self.head_dim**-0.5)


Layouts = tuple[RowLayout, RowLayout]
"""Rows of keys and of values."""


def layouts_of(widths: str, kv_heads: int, head_dim: int, group_size: int = 128) -> Layouts:
    """Rows of given widths in bits, such as k3v2 or k16v2."""
    goal = BitGoal.parse(widths)
    assert goal.key is not None
    assert goal.value is not None
    key, value = (RowLayout(kv_heads, head_dim, group_size, torch.bfloat16, bits) for bits in (goal.key, goal.value))
    return key, value


def layer_format(layouts: Layouts, key: SideTransform, value: SideTransform) -> LayerFormat:
    """Sides in rows of given layouts."""
    of_sides = zip(layouts, (key, value), strict=True)
    sides = (SideFormat(layout.group_size, layout.scale_dtype, layout.bits, of) for layout, of in of_sides)
    return LayerFormat(layouts[0].kv_heads, layouts[0].head_dim, *sides)


def random_cache(
    slots: int, requests: int, layouts: Layouts, windows: Windows, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> LayerCache:
    """Random codes, scales around 0.5 and zero points around 1.5; normal numbers in rows of 16 bits."""
    heads = (layouts[0].kv_heads, layouts[0].head_dim)
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def rows(layout: RowLayout) -> torch.Tensor:
        data = torch.empty(slots, layout.row_bytes, dtype=torch.uint8, device="cuda")
        if layout.exact:
            data.view(layout.exact_dtype).normal_(generator=generator)
            return data
        data.random_(generator=generator)
        params = torch.rand(
            slots, layout.kv_heads * layout.groups, 2, device="cuda", generator=generator, dtype=torch.bfloat16
        )
        params = params * 0.5 + torch.tensor([0.25, 1.25], device="cuda", dtype=torch.bfloat16)
        data[:, layout.params_offset :] = params.to(layout.scale_dtype).flatten(1).view(torch.uint8)
        return data

    def window(size: int) -> torch.Tensor:
        return torch.randn((requests + 1, size, *heads), device="cuda", generator=generator).to(dtype)

    sides = (window(windows.sink), window(windows.sink), window(windows.ring), window(windows.ring))
    return LayerCache(*layouts, windows, *map(rows, layouts), *sides)


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


def stock_layers(
    heads: Heads, batch: int, length: int, dtype: torch.dtype
) -> tuple[BatchTables, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tables of requests; keys and values of every layer in a stock cache, [pages, page_size, kv heads, head_dim]."""
    tables, slots = shuffled_tables([length] * batch, PAGE)
    shape = (slots // PAGE, PAGE, heads.kv, heads.head_dim)
    layers = layers_of(2 * dtype.itemsize * math.prod(shape))
    return tables, [(random_pages(shape, dtype), random_pages(shape, dtype)) for _ in range(layers)]


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
