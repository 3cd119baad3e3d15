"""How a process is to be started: what ``_posixsubprocess.fork_exec`` is told, and what a process inherits besides."""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

ARGUMENTS = (
    "args executables close_fds keep cwd env stdin _ _ stdout _ stderr _ error_pipe restore_signals session "
    + ("group " if sys.version_info >= (3, 11) else "")
    + "gid groups uid umask before_exec"
).split()
"""Of ``_posixsubprocess.fork_exec``, in order; ends of pipes that stay with the parent have no name here."""


def _limits() -> dict[int, tuple[int, int]]:
    kinds = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {kind: resource.getrlimit(kind) for kind in kinds}


def _ignored() -> list[int]:
    return [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def _umask() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


@dataclass(frozen=True)
class Program:
    """The part of a command line that says what Python runs: ``-c``, ``-m`` or a script, and its arguments."""

    kind: str
    what: str
    arguments: list[str]


@dataclass(frozen=True)
class Launch:
    """A process to be started.

    Attributes:
        command: its command line, the interpreter first.
        options: options of the interpreter.
        program: what Python runs; None: something that no fork can stand in for.
        environment: variables.
        cwd: working directory.
        descriptors: numbers in the new process by the numbers here.
        parent: process that starts it.
        session: whether it leads a session of its own.
        group: process group: 0 for one of its own.
        umask: mode bits that new files lack.
        limits: soft and hard limits of resources.
        cores: CPU cores it may run on.
        ignored: signals it ignores.
        blocked: signals it blocks.
        dies_with_parent: whether the kernel kills it when its parent dies.
    """

    command: list[str]
    options: list[str]
    program: Program | None
    environment: dict[str, str]
    cwd: str
    descriptors: list[tuple[int, int]]
    session: bool
    group: int
    umask: int
    dies_with_parent: bool
    parent: int = field(default_factory=os.getpid)
    limits: dict[int, tuple[int, int]] = field(default_factory=_limits)
    cores: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    ignored: list[int] = field(default_factory=_ignored)
    blocked: list[int] = field(default_factory=lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    def encode(self) -> bytes:
        """As bytes that ``decode`` reads."""
        return marshal.dumps(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Launch:
        """What ``encode`` has written."""
        fields = marshal.loads(data)
        return Launch(**fields | {"program": Program(**fields["program"])})


def described(arguments: Sequence[Any], allowed: Set[Callable[[], None] | None]) -> Launch | None:
    """The launch that a call of ``_posixsubprocess.fork_exec`` asks for; None where it asks for what no fork does.

    Args:
        arguments: of the call.
        allowed: what may run before exec: functions by which the new process dies with its parent, or None.
    """
    asked = dict(zip(ARGUMENTS, arguments, strict=False))
    before_exec = asked["before_exec"]
    if not asked["close_fds"] or before_exec not in allowed:
        return None
    if any(asked[name] not in {None, -1} for name in ("gid", "groups", "uid")):
        return None
    standard = [
        number if asked[name] == -1 else asked[name] for number, name in enumerate(("stdin", "stdout", "stderr"))
    ]
    kept = [number for number in asked["keep"] if number != asked["error_pipe"]]
    variables = os.environb.items() if asked["env"] is None else (entry.split(b"=", 1) for entry in asked["env"])
    command = resolved(
        [os.fsdecode(arg) for arg in asked["args"]], [os.fsdecode(path) for path in asked["executables"]]
    )
    cwd = os.path.abspath(os.fsdecode(asked["cwd"] or "."))
    options, program = parsed(command, cwd)
    return Launch(
        command=command,
        options=options,
        program=program,
        environment={os.fsdecode(name): os.fsdecode(value) for name, value in variables},
        cwd=cwd,
        descriptors=[*((number, own) for own, number in enumerate(standard)), *((number, number) for number in kept)],
        session=bool(asked["session"]),
        group=asked.get("group", -1) if asked.get("group", -1) >= 0 else os.getpgrp(),
        umask=asked["umask"] if asked["umask"] >= 0 else _umask(),
        dies_with_parent=before_exec is not None,
    )


def resolved(args: list[str], executables: list[str]) -> list[str]:
    """The command line with the interpreter of a script in front, as the kernel does it for a first line with ``#!``.

    Of several places of an executable the first that exists is taken.
    """
    path = next((path for path in executables if os.access(path, os.X_OK)), executables[0])
    if path != sys.executable and os.path.isfile(path):
        with open(path, "rb") as file:
            if file.readline().rstrip() == b"#!" + os.fsencode(sys.executable):
                return [sys.executable, path, *args[1:]]
    return [path, *args[1:]]


def parsed(command: list[str], cwd: str) -> tuple[list[str], Program | None]:
    """Options of the interpreter and the program of a command line. Options with a value are not understood."""
    rest = command[1:]
    options = []
    while rest and rest[0].startswith("-") and rest[0] not in {"-c", "-m"}:
        options.append(rest.pop(0))
    if len(rest) > 1 and rest[0] in {"-c", "-m"}:
        return options, Program(rest[0], rest[1], rest[2:])
    if rest and os.path.isfile(os.path.join(cwd, rest[0])) and not rest[0].endswith((".pyc", ".pyz", ".zip")):
        return options, Program("script", rest[0], rest[1:])
    return options, None
