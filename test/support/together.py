"""Servers that start at once, because start-up takes longer than most of what they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from support.servers import Server

if TYPE_CHECKING:
    from typing import Self


class Together:
    """Starts servers together; each is waited for when it is asked for, and all stop at the end.

    Args:
        starts: by name, what makes and starts a server.
    """

    def __init__(self, starts: Mapping[str, Callable[[], contextlib.AbstractContextManager[Server]]]) -> None:
        self._stack = contextlib.ExitStack()
        # A server ends with the thread that started it, so these live as long as the servers.
        self._starters = ThreadPoolExecutor(len(starts) or 1)
        self._servers: dict[str, Future[Server]] = {
            name: self._starters.submit(self._start, start) for name, start in starts.items()
        }

    def _start(self, start: Callable[[], contextlib.AbstractContextManager[Server]]) -> Server:
        return self._stack.enter_context(start())

    def __getitem__(self, name: str) -> Server:
        return self._servers[name].result()

    def close(self) -> None:
        """Stop all servers."""
        for server in self._servers.values():
            with contextlib.suppress(Exception):
                server.result()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
