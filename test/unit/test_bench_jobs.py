"""Jobs of ``oscar bench``: what came before a fault, before the process died, and before the time was over, is kept.

A job's process imports this file, so it imports little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from oscar_tools.bench import jobs


def counting(until: int) -> Iterator[int]:
    yield from range(until)
    if until > 2:
        raise RuntimeError("CUDA out of memory\nand more")


def dying() -> Iterator[int]:
    yield 0
    os._exit(7)


def waiting(seconds: float) -> Iterator[int]:
    yield 0
    time.sleep(seconds)


def test_jobs_give_what_they_have() -> None:
    begin, took = time.monotonic(), list[int]()
    until = begin + 300
    assert jobs.run(counting, 2, until=until, take=took.append) is None
    assert jobs.run(counting, 3, until=until, take=took.append) == "CUDA out of memory"
    assert jobs.run(dying, until=until, take=took.append) == "its process ended with status 7"
    assert took == [0, 1, 0, 1, 2, 0]
    assert jobs.run(waiting, 1000.0, until=time.monotonic(), take=took.append) == jobs.OUT_OF_TIME
    assert time.monotonic() < until
