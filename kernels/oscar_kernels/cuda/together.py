"""Compile several CUDA kernels at once, in processes of their own: NVRTC compiles one after the other in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from oscar_kernels.cuda import jit
from oscar_kernels.errors import KernelError

Job = tuple[str, tuple[tuple[str, int], ...]]
"""A file in ``src`` and macros, as :func:`oscar_kernels.cuda.jit.load` takes them."""
REFUSED = 3
"""Exit status of a process whose source does not compile."""


def compile_together(jobs: Iterable[Job]) -> None:
    """Have the machine code of kernels in the cache on disk, where there is one, before they are loaded.

    What does not compile is left to whoever loads it, who is told why.

    Args:
        jobs: what will be loaded; what is there already costs nothing.

    Raises:
        KernelError: there is no compiler, or a process failed otherwise than by its source.
    """
    missing = [job for job in dict.fromkeys(jobs) if not jit.is_kept(job[0], dict(job[1]))]
    # One is compiled as soon where it is loaded.
    if len(missing) < 2 or jit.cache_dir() is None:
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(_compile_apart, missing):
            pass


def _compile_apart(job: Job) -> None:
    name, defines = job
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, json.dumps(dict(defines))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, REFUSED):
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else f"exit status {done.returncode}"
        raise KernelError(f"a process that was to compile {name} failed: {why}", done.stderr)


if __name__ == "__main__":
    try:
        jit.compile_source(sys.argv[1], json.loads(sys.argv[2]))
    except KernelError:
        sys.exit(REFUSED)
