"""The asking side: stands in for the function of the standard library that starts processes."""

from __future__ import annotations

import _posixsubprocess
import ctypes
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from support.warm import channel
from support.warm.launch import Launch, described
from support.warm.rule import OTHER_PROGRAM, Warm, misfits, must_start_anew, shadowed

LOG = "OSCAR_TEST_WARM_LOG"
"""Environment variable: a file to which every launch is written, and why it was not forked."""
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)
start_anew = _posixsubprocess.fork_exec
_asking = threading.Lock()


class Client:
    """A warm process, child of this one."""

    def __init__(self, link: socket.socket, warm: Warm) -> None:
        self.link = link
        self.warm = warm
        self._owner = os.getpid()

    def owned(self) -> bool:
        """Whether it is this process's own and not that of the one which this was forked from."""
        return self._owner == os.getpid()

    def start(self, launch: Launch) -> int:
        """Start a process and return its id.

        Raises:
            RuntimeError: the warm process has died, or the new process could not be set up.
        """
        with _asking:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                channel.send(self.link, launch.encode(), [number for number, _ in launch.descriptors])
                answer = channel.receive(self.link)
            except (OSError, EOFError) as error:
                raise RuntimeError(self.fault()) from error
            finally:
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if answer is None:
            raise RuntimeError(self.fault())
        started = marshal.loads(answer[0])
        if not isinstance(started, int):
            raise RuntimeError(f"{launch.command} could not be forked from a warm process: {started}")
        return started

    def fault(self) -> str:
        """What is to be said when the warm process is gone."""
        return "the warm process that tests fork from has died; OSCAR_TEST_WARM=0 does without"


def install(find: Callable[[Launch], Client | None]) -> None:
    """Let ``subprocess`` and ``multiprocessing`` fork what may be forked.

    Args:
        find: gives the warm process for a launch; None where there is none.
    """

    def fork_exec(*arguments: Any) -> int:
        launch = described(arguments, _die_with_parent())
        reason = "not described" if launch is None else must_start_anew(launch)
        if reason is None and launch is not None:
            client = find(launch)
            reason = "no warm process with this environment" if client is None else _misfit(launch, client)
            if reason is None and client is not None:
                _note("forked", arguments)
                return client.start(launch)
        _note(reason or "", arguments)
        return start_anew(*arguments)

    _posixsubprocess.fork_exec = fork_exec  # type: ignore[assignment]
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _misfit(launch: Launch, client: Client) -> str | None:
    if not client.owned():
        return "warm process of another"
    if {own for _, own in launch.descriptors}.intersection(client.warm.descriptors):
        return "a file descriptor's number is taken"
    if (reason := misfits(launch, client.warm)) is not None:
        return reason
    if names := shadowed(launch, client.warm):
        return f"replaced modules: {', '.join(names)}"
    return None


def _die_with_parent() -> set[Callable[[], None] | None]:
    """The functions that the project lets run before exec, and none."""
    names = ("oscar_tools.local_server", "sglang_oscar.rotation_source.on_the_spot")
    return {getattr(sys.modules.get(name), "_die_with_parent", None) for name in names} | {None}


def _note(what: str, arguments: tuple[Any, ...]) -> None:
    if what != OTHER_PROGRAM:
        log(what, b" ".join(os.fsencode(part) for part in arguments[0]))


def log(what: str, of: bytes) -> None:
    """Add a line to the file that :data:`LOG` names."""
    if path := os.environ.get(LOG):
        with open(path, "ab") as file:
            file.write(b"%d %s: %s\n" % (os.getpid(), what.encode(), of[:300].replace(b"\n", b" ")))
