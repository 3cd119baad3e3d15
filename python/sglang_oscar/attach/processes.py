"""What a process of a server needs hooked, told by who started it and what it is going to run.

The process that launches a server resolves its arguments, and so knows whether int2 mode is asked for. It says so in
its environment, which its workers inherit. A worker that was told nothing, because its arguments passed no gate, is
hooked for int2 mode: the gate's mark on the arguments is then missing, and it refuses them by name.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from types import FrameType

MARK = "OSCAR_SERVERS_ASK_FOR"
"""Environment variable of a launching process and its workers."""
INT2, OTHER = "int2", "other"
SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
LAUNCHERS = "sglang.srt.entrypoints."
"""Modules of SGLang that launch servers."""


def begin() -> None:
    """Forget, in a process that launches servers, what the environment says of somebody else's."""
    if _launches():
        os.environ.pop(MARK, None)


def declare(int2: bool) -> None:
    """Tell the workers of this process's servers. A process may launch several; one in int2 mode is enough."""
    if int2 or os.environ.get(MARK) != INT2:
        os.environ[MARK] = INT2 if int2 else OTHER


def detokenizes() -> bool:
    """Whether this process turns tokens into text and does nothing else: it resolves no arguments and runs no model."""
    return multiprocessing.parent_process() is not None and _loader() == DETOKENIZER


def schedules() -> bool:
    """Whether this process is a worker that has imported SGLang's scheduler to run it."""
    return not _launches() and SCHEDULER in sys.modules


def may_serve_int2() -> bool:
    """Whether the server of this worker may have asked for int2 mode."""
    return os.environ.get(MARK) != OTHER


def _launches() -> bool:
    """Whether this process launches servers: one that nobody of its language started, or one that makes an Engine or
    calls ``launch_server``, as children of trainers do."""
    return multiprocessing.parent_process() is None or _loader().startswith(LAUNCHERS)


def _loader() -> str:
    """The module that has SGLang load its plugins just now, or ""."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "load_plugins":
        frame = frame.f_back
    return "" if frame is None or frame.f_back is None else str(frame.f_back.f_globals.get("__name__", ""))
