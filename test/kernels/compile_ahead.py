"""Compile what a server launches at once, then say what is left to compile at its launches: ``compile_ahead.py [THREADS]``.

For a GPU of compute capability 9.0 that is not there (:mod:`compile_triton`), two kinds of layers, ways of extend with
and without a workspace, decode and verification. Prints for each how many kernels were compiled ahead, how many by
the launches that followed, and the seconds of both. To be run without TRITON_INTERPRET, with an empty cache.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import test_sink_logits as exits
import torch
from compile_triton import Absent
from kernel_cases import empty_cache
from test_ragged_extend import TorchRagged
from test_warm_up import LIMITS, nothing
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.triton.ahead import compiling
from oscar_kernels.triton.decode import decode
from sglang_oscar.attention import warm_up
from sglang_oscar.memory.layer import CachedLayer

CPU = torch.device("cpu")
MORE_BITS = {"k_bits": 3, "v_bits": 4}
STEPS = 1, 2, 4, 8, 16, 150
DRAFTS = 4


def layers() -> list[CachedLayer]:
    first = exits.layer_of(centered=True)
    shape = replace(exits.SHAPE, **MORE_BITS)
    key, value = first.format.key.transform, first.format.value.transform
    return [first, CachedLayer(empty_cache(shape, 25, 3, CPU), shape.format(key, value))]


def launch_all(kernels: Any, of: list[CachedLayer], limits: Any, with_captured: bool, drafts: int) -> None:
    shape = exits.SHAPE
    hits = warm_up.PrefixHits(shape.page_size, limits, max_batch=200, longest=10_000)
    warm_up.chunks_behind_prefixes(kernels, of, shape.q_heads, shape.dtype, hits, True)
    if with_captured:
        warm_up.captured(kernels, of, shape.q_heads, shape.dtype, hits, STEPS, drafts, True)


def main() -> None:
    driver.set_active(Absent(90))
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    TorchRagged.forward_return_lse = nothing
    TorchRagged.forward = lambda self, q, *args, **options: torch.zeros_like(q)
    built: list[str] = []
    knobs.compilation.listener = lambda *, src, **rest: built.append(src.name)
    for limits, drafts in ((LIMITS, 0), (None, DRAFTS)):
        of = layers()
        kernels = exits.kernels_of("triton", of[0])
        kernels._prepared |= {id(of[1]): prepare(of[1].format, exits.SHAPE.dtype)}
        if limits is not None:
            planner = RaggedPlanner(
                exits.SHAPE.format(), exits.SHAPE.q_heads, exits.SHAPE.dtype, limits, CPU, TorchRagged
            )
            kernels._ragged = RaggedExtend(planner, decode)
        counts, begin = [], time.monotonic()
        for ahead in (True, False):
            built.clear()
            if ahead:
                with compiling():
                    launch_all(kernels, of, limits, True, drafts)
            else:
                launch_all(kernels, of, limits, True, drafts)
            counts += [len(built), f"{time.monotonic() - begin:.1f}"]
        print(*counts, flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))
    main()
