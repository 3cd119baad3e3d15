"""Compile at once what a server launches, then say what its launches still compile: ``compile_ahead.py [CORES]``.

For a GPU of compute capability 9.0 that is not there (:mod:`compile_triton`), two kinds of layers, extend with a
workspace and decode, extend without one and verification. Prints for each how many kernels were compiled ahead and how
many by the launches that followed, on stderr the seconds of both; then what a launch says of a kernel that does not
compile. To be run without TRITON_INTERPRET, with an empty cache.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import test_sink_logits as exits
import torch
import triton
from compile_triton import Absent
from kernel_cases import empty_cache
from test_ragged_extend import TorchRagged
from test_warm_up import LIMITS, nothing
from triton import knobs
from triton.compiler import CompilationError
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
STEPS = 1, 16, 150
DRAFTS = 4


def layers() -> list[CachedLayer]:
    first = exits.layer_of(centered=True)
    shape = replace(exits.SHAPE, **MORE_BITS)
    key, value = first.format.key.transform, first.format.value.transform
    return [first, CachedLayer(empty_cache(shape, 25, 3, CPU), shape.format(key, value))]


@triton.jit
def _wrong_kernel(x_ptr):
    x_ptr.nothing_of_this_name()


def launch_all(kernels: Any, of: list[CachedLayer], limits: Any, drafts: int) -> None:
    shape = exits.SHAPE
    hits = warm_up.PrefixHits(shape.page_size, limits, max_batch=200, longest=10_000)
    dummies = warm_up.Dummies(kernels, of, shape.page_size, shape.q_heads, shape.dtype, True)
    warm_up.chunks_behind_prefixes(dummies, hits)
    warm_up.captured(dummies, STEPS, drafts)


def kernels_of(of: list[CachedLayer], limits: Any) -> Any:
    shape, made = exits.SHAPE, exits.kernels_of("triton", of[0])
    made._prepared |= {id(of[1]): prepare(of[1].format, shape.dtype)}
    if limits is not None:
        planner = RaggedPlanner(shape.format(), shape.q_heads, shape.dtype, limits, CPU, TorchRagged)
        made._ragged = RaggedExtend(planner, decode)
    return made


def main() -> None:
    driver.set_active(Absent(90))
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Compile, and find out what became of it, as a launch would."""
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        return kernel.result() if hasattr(kernel, "future") and not warmup else kernel

    JITFunction.run = launch
    TorchRagged.forward_return_lse = nothing
    TorchRagged.forward = lambda self, q, *args, **options: torch.zeros_like(q)
    built: list[str] = []
    knobs.compilation.listener = lambda *, src, **rest: built.append(src.name)
    for limits, drafts in ((LIMITS, 0), (None, DRAFTS)):
        of = layers()
        kernels, counts = kernels_of(of, limits), []
        for within in (compiling(), nullcontext()):
            built.clear()
            begin = time.monotonic()
            with within:
                launch_all(kernels, of, limits, drafts)
            counts.append(len(built))
            print(f"{time.monotonic() - begin:.1f} s, {time.process_time():.1f} s of cores so far", file=sys.stderr)
        print(*counts, flush=True)
    _wrong_kernel.module = "oscar_kernels.planted"
    with compiling():
        _wrong_kernel[(1,)](torch.zeros(1))
    try:
        _wrong_kernel[(1,)](torch.zeros(1))
    except CompilationError as error:
        print("nothing_of_this_name" in str(error))


if __name__ == "__main__":
    if sys.argv[1:]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    main()
