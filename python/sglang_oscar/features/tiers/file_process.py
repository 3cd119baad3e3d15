"""Files of pages, moved by a process of its own, so that the scheduler does not wait for the interpreter.

A thread that writes files gives the interpreter up with every call of the operating system. Beside a scheduler that
never rests it has it back after 5 ms, so one thread moves little; and several threads take it whenever the scheduler
leaves it for a moment, which slows the scheduler down many times over (``benchmark/serving/bench_storage.py``). Here a
thread of the scheduler copies 64 MB at once, sends a line and receives a line.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from sglang_oscar.features.tiers.finite import Column
from sglang_oscar.features.tiers.line_process import LineProcess
from sglang_oscar.features.tiers.page_files import FAILED, OK, Do, Job, Outcome
from sglang_oscar.features.tiers.pages import HostPages

logger = logging.getLogger(__name__)
SHARED_BYTES = 128 << 20
"""Memory that is shared with the process, for two parts: one is copied while files of the other are moved."""
ANSWER_SECONDS = 60.0
"""For a part, 64 MB: a file system that takes longer hangs, and recomputing is faster in any case."""
HANGING = "the process for files was killed and has not ended, so its file system hangs"
"""What is said of pages until it has."""


class FileProcess:
    """Moves pages between host memory and files. The process is started when there is something to move.

    Args:
        pages: of the host tier.
        shared_bytes: of the memory that is shared with the process; at least two pages.
        seconds: after which a process that does not answer is killed. Pages it should have moved have failed.
        columns: where a page has its numbers; a page of which one is not finite is not written.
    """

    def __init__(
        self,
        pages: HostPages,
        shared_bytes: int = SHARED_BYTES,
        seconds: float = ANSWER_SECONDS,
        columns: Sequence[Column] = (),
    ) -> None:
        self._pages = pages
        self._page_bytes = pages.layout.page_bytes
        self._part = max(1, shared_bytes // (2 * self._page_bytes))
        self._lock = threading.Lock()
        self._seconds = seconds
        self._columns = columns
        self._process: LineProcess | None = None
        self._hanging: LineProcess | None = None

    def write(self, numbers: list[int], paths: list[str], keys: list[str]) -> list[Outcome]:
        """Write pages of the host tier, each to a file that is there in whole or not at all.

        Args:
            numbers: of pages of the host tier.
            paths: of their files; one that is there is left as it is.
            keys: 64 hex digits each, part of the digest.

        Returns:
            what became of each.
        """
        return self._move("write", numbers, paths, keys)

    def read(self, numbers: list[int], paths: list[str], keys: list[str]) -> list[Outcome]:
        """Read pages into the host tier; arguments as of :meth:`write`.

        Returns:
            what became of each. The place of one that is not there is left as it was.
        """
        return self._move("read", numbers, paths, keys)

    def close(self) -> None:
        """End the process, once it has done what it was told."""
        with self._lock:
            self._end(self._seconds)

    def look(self, paths: list[str]) -> list[Outcome]:
        """Whether files are there: :data:`~sglang_oscar.features.tiers.page_files.OK` or ``MISSING`` of each."""
        return self._move("look", [0] * len(paths), paths, [""] * len(paths))

    def _move(self, do: Do, numbers: list[int], paths: list[str], keys: list[str]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._lock:
            if self._still_hangs():
                return [Outcome(FAILED, HANGING)] * len(numbers)
            try:
                for part in self._parts(do, list(zip(numbers, paths, keys, strict=True))):
                    outcomes += part
            except OSError as error:
                why = self._lost(error)
                logger.warning("int2 storage: %s", why)
                outcomes += [Outcome(FAILED, why)] * (len(numbers) - len(outcomes))
            except BaseException:
                self._end(1)  # its outcomes would be taken for those of later pages
                raise
        return outcomes

    def _lost(self, error: OSError) -> str:
        """End the process behind an error, and say what happened."""
        if self._process is None:
            return f"no process for files ({error}); the next pages start one"
        is_late = isinstance(error, TimeoutError)
        code = self._end(0 if is_late else 1)
        if code is None:
            return f"{HANGING} ({error}); no page is read or written until it has"
        if is_late:
            return f"the process for files gave {error} and was killed; the next pages start another"
        return f"the process for files ended with {code}; the next pages start another"

    def _parts(self, do: Do, pages: list[tuple[int, str, str]]) -> Iterator[list[Outcome]]:
        """Outcomes part by part. The next part is on its way while the process works at one."""
        process = self._started()
        waiting: list[tuple[list[int], np.ndarray]] = []
        size = max(1, len(pages)) if do == "look" else self._part
        for index, begin in enumerate(range(0, len(pages), size)):
            if len(waiting) == 2:
                yield self._outcomes(do, *waiting.pop(0))
            part, first = pages[begin : begin + size], index % 2 * self._part
            numbers, shared = [number for number, *_ in part], self._shared[first : first + len(part)]
            if do == "write":
                self._pages.copy_out(numbers, shared)
            jobs = [Job(do, first + place, path, key) for place, (_, path, key) in enumerate(part)]
            process.send(json.dumps(jobs).encode())
            waiting.append((numbers, shared))
        for numbers, shared in waiting:
            yield self._outcomes(do, numbers, shared)

    def _outcomes(self, do: Do, numbers: list[int], shared: np.ndarray) -> list[Outcome]:
        """Wait for a part. What was read is copied to the host tier.

        Raises:
            OSError: the process has ended, or does not answer.
        """
        assert self._process is not None
        outcomes = [Outcome(*of) for of in json.loads(self._process.receive())]
        if do == "read":
            there = [place for place, of in enumerate(outcomes) if of.result == OK]
            read = shared if len(there) == len(numbers) else shared[there]  # copied once only where all are there
            self._pages.copy_in([numbers[place] for place in there], read)
        return outcomes

    def _started(self) -> LineProcess:
        """The process, started where there is none."""
        if self._process is None:
            descriptor = os.memfd_create("int2-pages")
            try:
                os.ftruncate(descriptor, 2 * self._part * self._page_bytes)
                self._shared = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(-1, self._page_bytes)
                sizes = (descriptor, self._page_bytes, self._pages.layout.item_bytes)
                command = [sys.executable, "-m", "sglang_oscar.features.tiers.page_files", *map(str, sizes)]
                self._process = LineProcess(command, self._seconds, (descriptor,))
                self._process.send(json.dumps(self._columns).encode())
            finally:
                os.close(descriptor)
        return self._process

    def _end(self, patience: float) -> int | None:
        """End the process, and say how it ended; None where there is none, or it hangs."""
        process, self._process = self._process, None
        if process is None:
            return None
        if (code := process.end(patience)) is None:
            self._hanging = process
        return code

    def _still_hangs(self) -> bool:
        """Whether a process that was killed is still there: another one would soon hang beside it."""
        if self._hanging is not None and self._hanging.has_ended:
            self._hanging = None
        return self._hanging is not None
