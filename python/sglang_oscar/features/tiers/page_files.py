"""A process that reads and writes files of pages: ``python -m sglang_oscar.features.tiers.page_files``.

:class:`sglang_oscar.features.tiers.file_process.FileProcess` starts it. Pages lie in memory that both share. A line of
standard input is a list of jobs, after one that says where a page has its numbers; a line of standard output is the
list of outcomes. The end of the input ends the process. Imports no PyTorch, so that it is there at once and takes
little memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import mmap
import os
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Literal, NamedTuple

from sglang_oscar.features.tiers.digest import UNLIKE, is_intact, sign
from sglang_oscar.features.tiers.finite import Column, is_finite

THREADS = 4
"""Files at once. Nothing else runs in this process, so they do not wait for the interpreter."""
OK, MISSING, DAMAGED, ENDLESS, FAILED = "ok", "missing", "damaged", "not finite", "failed"
"""What became of a job: ENDLESS of a page that is not written, as it holds NaN; FAILED says nothing of a file."""
Do = Literal["look", "read", "write"]
"""What there is to do."""
UNFINISHED = ".int2-"
"""How names of files begin that are being written."""
ABANDONED_SECONDS = 600
"""Age of an unfinished file that nobody writes any more, where a file system has no locks. A page takes far less."""


class Job(NamedTuple):
    """One file: what to do with it, the page's place in shared memory, its path, and the key of the page."""

    do: Do
    place: int
    path: str
    key: str


class Layout(NamedTuple):
    """Of a page: bytes of its rows, which the trailer follows, and where its numbers are."""

    item_bytes: int
    columns: list[Column]


class Outcome(NamedTuple):
    """What became of a job, and why."""

    result: str
    why: str = ""


def look(page: memoryview, layout: Layout, job: Job) -> Outcome:
    """Whether a file is there."""
    return Outcome(OK if os.path.exists(job.path) else MISSING)


def write(page: memoryview, layout: Layout, job: Job) -> Outcome:
    """Write a page, unless there is one: its key says what it holds. Others see the whole file or none."""
    if os.path.exists(job.path):
        return Outcome(OK)
    if not is_finite(page, layout.columns):
        return Outcome(ENDLESS)
    sign(job.key, page, layout.item_bytes)
    try:
        with unfinished_file(os.path.dirname(job.path)) as file:
            try:
                file.write(page)
                file.flush()
                os.replace(file.name, job.path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.remove(file.name)
                raise
    except OSError as error:
        return Outcome(FAILED, str(error))
    return Outcome(OK)


def unfinished_file(folder: str) -> IO[bytes]:
    """A new file to write a page to, locked as long as it is open: a lock ends with its process, however that ends."""
    while True:
        file = open(os.path.join(folder, f"{UNFINISHED}{uuid.uuid4().hex}.tmp"), "xb")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks, of which remove_abandoned asks the age
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink > 0:
            return file
        file.close()  # removed by a process that looked between the opening and the lock


def remove_abandoned(folder: str) -> None:
    """Remove what processes that were killed have left unfinished, and nothing that another server is writing.

    Locks tell the two apart also where servers run in containers, whose process ids mean nothing to each other.
    """
    for path in glob.glob(os.path.join(glob.escape(folder), f"{UNFINISHED}*.tmp")):
        with contextlib.suppress(OSError), open(path, "r+b") as file:  # gone by now, or another user's
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # no locks here
                if time.time() - os.fstat(file.fileno()).st_mtime < ABANDONED_SECONDS:
                    continue
            os.remove(path)


def read(page: memoryview, layout: Layout, job: Job) -> Outcome:
    """Read a page and check it."""
    try:
        with open(job.path, "rb", buffering=0) as file:
            size = file.readinto(page)
    except FileNotFoundError:
        return Outcome(MISSING)
    except OSError as error:
        return Outcome(FAILED, str(error))
    if size != len(page):
        return Outcome(DAMAGED, f"it has {size} bytes instead of {len(page)}")
    return Outcome(OK) if is_intact(job.key, page, layout.item_bytes) else Outcome(DAMAGED, UNLIKE)


DOES = {"look": look, "read": read, "write": write}


def main(descriptor: int, page_bytes: int, item_bytes: int) -> None:
    """Do jobs until there are no more.

    Args:
        descriptor: of the file whose memory is shared.
        page_bytes: of a page.
        item_bytes: of its rows, which the trailer follows.
    """
    # Ctrl-C goes to the server too, which ends this process when it has written what it wants to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody reads answers where the server was killed.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    shared = memoryview(mmap.mmap(descriptor, 0))
    layout = Layout(item_bytes, [Column(*of) for of in json.loads(sys.stdin.buffer.readline())])

    def do(job: Job) -> Outcome:
        begin = job.place * page_bytes
        try:
            return DOES[job.do](shared[begin : begin + page_bytes], layout, job)
        except Exception as error:  # of one page, which takes no other along
            return Outcome(FAILED, f"{type(error).__name__}: {error}")

    tidied: set[str] = set()
    with ThreadPoolExecutor(THREADS) as threads:
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):  # killed while it wrote
                break
            jobs = [Job(*job) for job in json.loads(line)]
            for folder in {os.path.dirname(job.path) for job in jobs if job.do == "write"} - tidied:
                # Beside the jobs: to list a folder of a million files takes longer than an answer may.
                threading.Thread(target=remove_abandoned, args=[folder], daemon=True).start()
                tidied.add(folder)
            # To look is sooner done than handed to a thread.
            at_once = map if all(job.do == "look" for job in jobs) else threads.map
            outcomes = list(at_once(do, jobs))
            sys.stdout.write(json.dumps(outcomes) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
