"""Run code that a model wrote, with limits: a fence against accidents, not a sandbox.

The code has a process and a session of its own, an empty folder to work in, no input, none of the user's environment,
and limits on time, memory, files and processes. It still runs as the user and may read and delete what the user may,
and use the network: whoever does not trust a model runs all of it in a container.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS, WALL = 10, 30.0
"""Of processor time, and of a clock: a busy machine must not make right answers wrong."""
MEMORY, FILE, FILES = 2**30, 2**24, 32
"""Bytes of address space, bytes of each file, open files."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Threads count as processes; without this numpy would start one for every core."""

RUNNER = f"""
import os, resource, sys
for what, limit in (
    (resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, {MEMORY}), (resource.RLIMIT_FSIZE, {FILE}),
    (resource.RLIMIT_NOFILE, {FILES}), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0),
):
    hard = resource.getrlimit(what)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (limit, limit))
parent, program = int(sys.argv.pop()), sys.argv.pop()
exec(compile(open(program, encoding="utf-8").read(), program, "exec"), {{"__name__": "__main__"}})
os.write(parent, os.read(parent, 64))
"""
"""What starts a program. Only after its last line is the token read that says so."""


def passes(program: str) -> bool:
    """Whether Python code runs to its end within the limits.

    Code that ends its process, also with status 0, does not. Nothing that it started in its session outlives the call.

    Args:
        program: source, its tests included.
    """
    token = secrets.token_hex(16).encode()
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory(prefix="oscar-code-", ignore_cleanup_errors=True) as folder, ours:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        with theirs:
            started = subprocess.Popen(
                [sys.executable, "-I", "-c", RUNNER, str(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            ours.settimeout(WALL)
            ours.sendall(token)
            return ours.recv(64) == token
        except OSError:
            return False
        finally:
            # The process is not waited for before, so that its number cannot be another group's.
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
