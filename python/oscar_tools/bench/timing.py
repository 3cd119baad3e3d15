"""Timing by CUDA graph replay, and the read bandwidth that kernels are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

COLD_BYTES = 400 << 20
"""Inputs of one graph replay together: several times the L2 cache of any current GPU."""
MOST_READ = 2 << 30
"""Bytes that the probe of the bandwidth reads; on a small card a quarter of what is free."""
Calls = list[Callable[[], object]]


def device() -> torch.device:
    """The GPU; without one the CPU, where Triton's interpreter runs the kernels and times mean nothing (tests)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def time_us(calls: Calls, replays: int = 15) -> float:
    """Median microseconds per call over replays of one CUDA graph of all ``calls``, which work on different data."""
    if device().type == "cpu":
        begin = time.perf_counter()
        for call in calls[:1]:
            call()
        return (time.perf_counter() - begin) * 1e6
    for call in calls[:1] * 2:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin_event, end_event in events:
        begin_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3 / len(calls)


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + first + step * BLOCK + tl.arange(0, BLOCK))
    total = tl.sum(total, 0)
    # Never true, but the compiler cannot know: the loads stay.
    if total == 0x7FFFFFF1:
        tl.store(out_ptr, total)


def read_bandwidth(size: int = MOST_READ) -> float:
    """GB/s of reading device memory once: the limit that the kernels are compared with.

    Args:
        size: bytes, rounded down to multiples of 512 KiB.
    """
    elements = max(size >> 19, 1) << 17
    # So small that no sum leaves int32.
    x = torch.randint(0, 1 << 13, (elements,), dtype=torch.int32, device=device())
    out = torch.zeros(1, dtype=torch.int32, device=device())
    times = []
    for block, steps in ((8192, 4), (8192, 16), (4096, 8)):
        launch = _read_kernel[(x.numel() // (block * steps),)]
        times.append(time_us([partial(launch, x, out, BLOCK=block, STEPS=steps, num_warps=8)]))
    return x.numel() * 4 / min(times) / 1e3


def layers_of(size: int) -> int:
    """Calls in a graph: as the layers of a model follow each other, and more than the L2 cache holds.

    Args:
        size: bytes that one call reads.
    """
    return min(max(4, -(-COLD_BYTES // size)), 8)
