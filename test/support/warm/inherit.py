"""What a new process has from its parent: a forked one, whose parent was another, takes it over."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Iterator

from support.warm import channel
from support.warm.launch import Launch

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
LOW = 256
"""File descriptors below are for launches: what a library opens in a warm process is to be above."""


def open_descriptors() -> set[int]:
    """Numbers of the open files."""
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}


@contextlib.contextmanager
def low_numbers_taken() -> Iterator[None]:
    """Let files that are opened in the ``with`` block have numbers above those of launches."""
    with contextlib.ExitStack() as stack:
        while (number := os.open(os.devnull, os.O_RDONLY)) < LOW:
            stack.callback(os.close, number)
        os.close(number)
        yield


def adopted(there: socket.socket, launch: Launch) -> None:
    """Wait until the process in between has ended, then take the place that a child of the asking process has.

    Raises:
        RuntimeError: the asking process has not inherited this one.
    """
    channel.receive(there)
    if launch.dies_with_parent:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launch.parent:
        raise RuntimeError(f"process {launch.parent} asked for this one, but its parent is {os.getppid()}")
    if launch.session:
        os.setsid()
    elif os.getpgrp() != launch.group:
        os.setpgid(0, launch.group)


def make_way(launch: Launch, *sockets: socket.socket) -> list[socket.socket]:
    """The sockets under numbers that are none of the launch's."""
    moved = []
    for moving in sockets:
        with moving:
            moved.append(socket.socket(fileno=fcntl.fcntl(moving, fcntl.F_DUPFD_CLOEXEC, _above(launch))))
    return moved


def settle(launch: Launch, received: list[int]) -> None:
    """Set what the kernel keeps for a process; ``received`` are the launch's file descriptors."""
    above = _above(launch)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in received]
    for number in received:
        os.close(number)
    for number, (_, own) in zip(high, launch.descriptors, strict=True):
        os.dup2(number, own)
        os.close(number)
    os.chdir(launch.cwd)
    os.umask(launch.umask)
    for kind, limits in launch.limits.items():
        if resource.getrlimit(kind) != limits:
            resource.setrlimit(kind, limits)
    os.sched_setaffinity(0, launch.cores)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in launch.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, launch.blocked)


def _above(launch: Launch) -> int:
    return max(LOW, 1 + max(own for _, own in launch.descriptors))
