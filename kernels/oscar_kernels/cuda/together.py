"""Compile several CUDA kernels at once, in processes of their own: NVRTC compiles one after the other in a process.

They are new interpreters, not forks, so they have no part in a server's CUDA context, threads or locks. They import
neither torch nor triton, and end with the thread that waits for them. What they compile, they leave in the cache.
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from oscar_kernels import compilers
from oscar_kernels.cuda import jit

Job = tuple[str, tuple[tuple[str, int], ...]]
"""A file in ``src`` and macros, as :func:`oscar_kernels.cuda.jit.load` takes them."""

logger = logging.getLogger(__name__)


def compile_together(jobs: Iterable[Job]) -> None:
    """Have the machine code of kernels in the cache on disk, where there is one, before they are loaded.

    What a process fails to compile is left to whoever loads it, who is told why; a warning says so.

    Args:
        jobs: what will be loaded; what is there already costs nothing.

    Raises:
        KernelError: there is no compiler.
    """
    missing = [job for job in dict.fromkeys(jobs) if not jit.is_kept(job[0], dict(job[1]))]
    # One is compiled as soon where it is loaded.
    if len(missing) < 2 or jit.cache_dir() is None:
        return
    with ThreadPoolExecutor(compilers.count()) as pool:
        failures = [why for why in pool.map(_compile_apart, missing) if why is not None]
    if failures:
        logger.warning(
            "%d of %d CUDA kernels were not compiled at once, but are one after the other: %s",
            len(failures), len(missing), failures[0],
        )  # fmt: skip


def _compile_apart(job: Job) -> str | None:
    """Compile in a process; returns why it failed, None where it did not."""
    name, defines = job
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, json.dumps(dict(defines))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _die_with_parent() -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    jit.compile_source(sys.argv[1], json.loads(sys.argv[2]))
