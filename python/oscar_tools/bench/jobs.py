"""Measurements in processes of their own, which end when the time is over.

Memory that has been allocated and given back before is handed out again in pieces. What lies in such pieces is read up
to 7% slower, and a server allocates its pools once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
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

    The process imports what the job's module imports, and not, as those of multiprocessing, what this one has run.

    Args:
        job, args: what to run.
        until: value of ``time.monotonic()`` at which it is cut off.
        take: called with each result.

    Returns:
        Why there are no further results, in one line; None where the job went through.
    """
    ours, theirs = os.pipe()
    program = f"from oscar_tools.bench import jobs; jobs.serve({theirs})"
    # In a session of its own, so that compilers that it starts end with it.
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs],
        start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    os.close(theirs)
    with process, Connection(ours, writable=False) as results:
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as given:
                pickle.dump((job, args), given)
            while results.poll(max(0.0, until - time.monotonic())):
                kind, value = results.recv()
                if kind != "result":
                    return None if value is None else str(value)
                take(value)
            return OUT_OF_TIME
        except EOFError:
            return f"its process ended with status {process.wait()}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def serve(to: int) -> None:
    """What the process does: run the job that standard input names.

    Args:
        to: file descriptor for results.
    """
    with Connection(to, readable=False) as results:
        try:
            job, args = pickle.load(sys.stdin.buffer)
            for result in job(*args):
                results.send(("result", result))
            results.send(("end", None))
        except Exception as error:  # whatever a kernel raises
            results.send(("end", first_line(error)))
