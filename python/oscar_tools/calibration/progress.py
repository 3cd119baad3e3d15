"""Progress of what takes minutes: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.progress import track

from oscar_rotation.terminal import progress_bar

T = TypeVar("T")
EVERY = 10.0
"""Seconds between lines."""


def stepping(items: Sequence[T], doing: str, unit: str) -> Iterator[T]:
    """Go through items and say how far that is.

    Args:
        items: one after the other.
        doing: what is done with them, such as "recording".
        unit: what they are, such as "prompts".
    """
    if sys.stdout.isatty():
        yield from track(items, doing)
        return
    tell = lines(doing, unit)
    for done, item in enumerate(items, 1):
        yield item
        tell(done, len(items))


def lines(doing: str, unit: str) -> Callable[[int, int], None]:
    """What is to be called with (done, total), and prints a line every :data:`EVERY` seconds and at the end."""
    said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        if done == total or time.monotonic() - said >= EVERY:
            said = time.monotonic()
            print(f"{doing}: {done} of {total} {unit}", flush=True)

    return tell


def fitting() -> AbstractContextManager[Callable[[int, int], None]]:
    """Progress of a fit, which is to be called with (done, total)."""
    return progress_bar() if sys.stderr.isatty() else _lines_of_fit()


@contextmanager
def _lines_of_fit() -> Iterator[Callable[[int, int], None]]:
    yield lines("fitting", "steps")
