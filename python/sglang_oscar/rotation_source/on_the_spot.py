"""Calibration before a server starts, in a child process of the one that launches it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from sglang_oscar.errors import Int2Error
from sglang_oscar.rotation_source.task import Task

TOOLS = "oscar_tools.calibration.on_request"
"""Module that calibrates; a server itself never imports it."""


def calibrate(task: Task, out: Path, log: Path, seconds: float, say: Callable[[str], None]) -> None:
    """Fill a folder with rotations of a model.

    Args:
        task: what to calibrate.
        out: folder to fill.
        log: file with all that the child and its server say; stays where the calibration fails.
        seconds: how long it may take.
        say: told each line of progress.

    Raises:
        Int2Error: it failed, or took too long; one line.
    """
    command = [sys.executable, "-m", TOOLS, str(out)]
    late = threading.Event()

    def give_up() -> None:
        late.set()
        _end(child)

    with log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            # The child makes one system call before exec, which is safe beside threads.
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )  # fmt: skip
        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:  # it says why in its log
                child.stdin.write(task.encode())
            for line in child.stdout:
                say(line.decode(errors="replace").rstrip())
            status = child.wait()
        finally:
            timer.cancel()
            _end(child)
    if late.is_set():
        raise Int2Error(
            f"calibration of {task.model} took longer than {seconds:.0f} s; raise SGLANG_OSCAR_CALIBRATE_SECONDS, or "
            f"calibrate beforehand with `oscar calibrate` (log: {log})"
        )
    if status:
        raise Int2Error(f"calibration of {task.model} failed: {_reason(log, status)} (log: {log})")
    log.unlink(missing_ok=True)


def _reason(log: Path, status: int) -> str:
    """What a child said last of its errors."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    places = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not places:
        return lines[-1] if lines else f"status {status}"
    said = lines[places[-1]].removeprefix("error: ")
    # Of a server that failed, the end of its log follows.
    causes = [line for line in lines[places[-1] + 1 :] if re.search(r"[Ee]rror: ", line)]
    return f"{said.partition('; end of ')[0]}: {causes[-1]}" if causes else said


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child; the server that it started ends with it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _die_with_parent() -> None:
    """Runs in the child: the kernel ends it when the process that started it dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
