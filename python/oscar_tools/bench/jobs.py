"""Measurements in processes of their own, which end when the time is over.

Memory that has been allocated and given back before is handed out again in pieces. What lies in such pieces is read up
to 7% slower, and a server allocates its pools once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from oscar_rotation.errors import first_line

Job = Callable[..., Iterator[Any]]
"""Yields results, each as soon as it is there. Job and arguments are pickled."""
OUT_OF_TIME = "out of time"


def run(job: Job, *args: object, until: float, take: Callable[[Any], None]) -> str | None:
    """Run a job in a new process and give each of its results to ``take``.

    Args:
        job, args: what to run.
        until: value of ``time.monotonic()`` at which it is cut off.
        take: called with each result.

    Returns:
        Why there are no further results, in one line; None where the job went through.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(theirs, job, args))
    process.start()
    theirs.close()
    ended = False
    try:
        while ours.poll(max(0.0, until - time.monotonic())):
            kind, value = ours.recv()
            if kind == "result":
                take(value)
                continue
            ended = True
            return value if kind == "error" else None
        return OUT_OF_TIME
    except EOFError:
        process.join()
        return f"its process ended with status {process.exitcode}"
    finally:
        process.join(timeout=5 if ended else 0)
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.join()


def _send(to: Connection, job: Job, args: tuple[object, ...]) -> None:
    """What the process does: in a group of its own, so that compilers that it has started end with it."""
    os.setsid()
    try:
        for result in job(*args):
            to.send(("result", result))
        to.send(("end", None))
    except Exception as error:  # whatever a kernel raises
        to.send(("error", first_line(error)))
