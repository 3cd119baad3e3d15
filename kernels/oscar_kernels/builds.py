"""Who is told when a kernel of this plugin is built: compiled or found on disk, for its first use in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[[str, float], None]
"""Takes a kernel's name and the seconds that building it took."""
PACKAGES = ("oscar_kernels", "sglang_oscar")
"""Whose Triton kernels count."""

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Tell of every kernel that is built from now on, CUDA and Triton; a listener that is there already is not added
    again. What else listens to Triton goes on to be told.
    """
    from triton import knobs

    if listener in _listeners:
        return
    if not _listeners:
        knobs.compilation.listener = _behind(knobs.compilation.listener)
    _listeners.append(listener)


def report(name: str, seconds: float) -> None:
    """Tell that a kernel was built."""
    for listener in _listeners:
        listener(name, seconds)


def is_ours(function: Any) -> bool:
    """Whether a function of Triton's is one of this plugin's."""
    return getattr(function, "module", "").partition(".")[0] in PACKAGES


def _behind(earlier: Callable[..., None] | None) -> Callable[..., None]:
    """Triton's listener, which compilation calls with everything by name."""

    def told(*, src: Any, times: Any, **rest: Any) -> None:
        if earlier is not None:
            earlier(src=src, times=times, **rest)
        # Kernels that are given as intermediate code have no function.
        if is_ours(getattr(src, "fn", None)):
            report(src.name, times.total / 1e6)

    return told
