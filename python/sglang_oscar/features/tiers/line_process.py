"""A process that is sent lines and answers each with a line; neither side ever waits for the other one to read."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Sequence

CHUNK = 1 << 16
"""Bytes that are read at once: what a pipe holds."""
KILL_SECONDS = 5.0
"""For a process that is killed to end. One that the operating system does not let go of takes longer."""


class LineProcess:
    """A process with two pipes, of any capacity. Not for several threads at once.

    Args:
        command: with arguments.
        seconds: without a byte in either direction after which it is given up.
        pass_fds: descriptors that it inherits.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], seconds: float, pass_fds: Sequence[int] = ()) -> None:
        self._seconds = seconds
        self._unsent, self._received = bytearray(), bytearray()
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def send(self, line: bytes) -> None:
        """Send a line: at once what the pipe takes, the rest in :meth:`receive`.

        Raises:
            OSError: the process has ended.
        """
        self._unsent += line + b"\n"
        self._send_some()

    def receive(self) -> bytes:
        """Wait for the next line, and send meanwhile what is left to be sent.

        Raises:
            TimeoutError: nothing came, and nothing could be sent, in the time that it has.
            OSError: the process has ended.
        """
        while (end := self._received.find(b"\n")) < 0:
            waiting = select.poll()
            waiting.register(self._output, select.POLLIN)
            if self._unsent:
                waiting.register(self._input, select.POLLOUT)
            ready = {descriptor for descriptor, _ in waiting.poll(self._seconds * 1000)}
            if not ready:
                raise TimeoutError(f"no answer for {self._seconds:g} seconds")
            if self._output.fileno() in ready:
                if not (more := self._output.read(CHUNK)):
                    raise BrokenPipeError("its output has ended")
                self._received += more
            if self._input.fileno() in ready:
                self._send_some()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _send_some(self) -> None:
        if self._unsent:
            del self._unsent[: self._input.write(self._unsent) or 0]

    def end(self, patience: float) -> int | None:
        """Close its pipes, which ends it, and kill it where that takes longer than ``patience`` seconds.

        Returns:
            its exit status; None where the operating system has not let go of it yet.
        """
        self._input.close()
        self._output.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            return self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return None
