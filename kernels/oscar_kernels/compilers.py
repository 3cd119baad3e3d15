"""How many compilers run at once."""

from __future__ import annotations

import os

MOST = 16
"""More would wait for Python's lock, which Triton's compiler holds for an eighth of its time."""


def count() -> int:
    """Compilers that a process runs at once: one for each core that it may use, up to :data:`MOST`.

    The ranks of a host each run so many. They compile the same at the same time, and would be done no sooner with a
    part of the cores each; :data:`MOST` bounds the memory that they take, 130 MB for a process of NVRTC.
    """
    return min(len(os.sched_getaffinity(0)), MOST)
