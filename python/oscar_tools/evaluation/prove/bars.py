"""Progress bars of measures that are asked, one below the other where several are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """Bars on stderr, where that is a terminal; shown as long as there is one, so that others may draw in between."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        hidden = not console.is_terminal
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden)
        self.count, self.lock = 0, threading.Lock()

    @contextmanager
    def bar(self, text: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Show a bar of ``total`` steps, of which some are done; gives what is to be called after each further one."""
        with self.lock:
            if not self.count:
                self.progress.start()
            self.count += 1
            task = self.progress.add_task(text, total=total, completed=done)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            with self.lock:
                self.progress.remove_task(task)
                self.count -= 1
                if not self.count:
                    self.progress.stop()
