"""Compile Triton kernels ahead, many at once: a launch compiles its kernel while everything else waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from oscar_kernels import compilers
from oscar_kernels.builds import is_ours


@contextmanager
def compiling() -> Iterator[None]:
    """While inside, launches of this plugin's Triton kernels start to compile them and run nothing, so what they would
    write is left as it was. All are compiled at the end, in threads: Triton's compiler works outside of Python's lock
    for seven eighths of its time. Not for a process that launches them in another thread meanwhile.

    What does not compile is left to the launch that needs it, which raises the compiler's error.
    """
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or is_ours(self), **options)

    with ThreadPoolExecutor(compilers.count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run
