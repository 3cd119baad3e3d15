"""Pages of one pool of the host tier in SGLang's files, moved by two processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from sglang_oscar.features.tiers.file_process import FileProcess
from sglang_oscar.features.tiers.file_room import reserved_groups
from sglang_oscar.features.tiers.finite import Column
from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.page_files import DAMAGED, ENDLESS, FAILED, MISSING, OK
from sglang_oscar.features.tiers.reports import say_endless, say_failed


def _positions(of: list[bool], value: bool) -> list[int]:
    return [at for at, is_so in enumerate(of) if is_so == value]


class PoolFiles:
    """Reads and writes files of pages of a pool; keys are salted.

    Args:
        backend: SGLang's files.
        pool: whose pages they are.
        columns: where a page has its numbers.
        damaged: told (name of a page, why) of one that is, to remove it.
        name: (key) the name of a page, as SGLang looks for it.
    """

    def __init__(
        self,
        backend: Any,
        pool: Int2HostPool,
        columns: Sequence[Column],
        damaged: Callable[[str, str], None],
        name: Callable[[str], str],
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._damaged = damaged
        self._name = name
        # Of two, so that a hit does not wait for pages that are written.
        self._reader = FileProcess(pool.pages, columns=columns)
        self._writer = FileProcess(pool.pages, columns=columns)

    def close(self) -> None:
        """End processes, once they are done."""
        self._reader.close()
        self._writer.close()

    def path(self, name: str) -> str:
        """The file of a page."""
        return os.path.join(self._backend.file_path, f"{self._backend._get_suffixed_key(name)}.bin")

    def count(self, keys: list[str]) -> int:
        """How many pages from the first on are there, as the operating system knows it."""
        there = [result == OK for result, _ in self._reader.look([self.path(self._name(key)) for key in keys])]
        return next((at for at, is_there in enumerate(there) if not is_there), len(there))

    def read(self, keys: list[str], host_indices: Any) -> list[bool]:
        """Read files of pages into host memory, int64 slots page by page; False where one is missing or damaged. The
        backend is told of those that were used and of those that are gone."""
        keys, numbers = [self._name(key) for key in keys], self._numbers(host_indices)
        paths = [self.path(key) for key in keys]
        outcomes = self._reader.read(numbers, paths, keys)
        index, failed = self._backend.metadata_cache, []
        for key, path, (result, why) in zip(keys, paths, outcomes, strict=True):
            name = self._backend._get_suffixed_key(key)
            if result == OK:
                self._backend._evictor.touch(name, path)
            elif result == DAMAGED:
                self._damaged(key, why)
            elif result == FAILED:
                failed.append((key, why))
            if index is not None and result in (OK, MISSING):
                (index.add if result == OK else index.remove)(name)
        say_failed("cannot be read and are computed again", failed, len(keys))
        return [result == OK for result, _ in outcomes]

    def write(self, keys: list[str], host_indices: Any) -> list[bool]:
        """Write files of pages of host memory, as far as the backend has room for them; those that are there need
        none. False where one could not be stored."""
        keys, numbers = [self._name(key) for key in keys], self._numbers(host_indices)
        names, paths = [self._backend._get_suffixed_key(key) for key in keys], [self.path(key) for key in keys]
        evictor, stored = self._backend._evictor, [False] * len(keys)
        if evictor.enabled:
            stored = [result == OK for result, _ in self._writer.look(paths)]
            for at in _positions(stored, True):
                evictor.touch(names[at], paths[at])
        new, failed, endless = _positions(stored, False), [], 0
        size = self._pool.page_layout.page_bytes
        for group in reserved_groups(evictor, [names[at] for at in new], [keys[at] for at in new], size):
            places = [new[at] for at in group]
            try:
                outcomes = self._writer.write(
                    [numbers[at] for at in places], [paths[at] for at in places], [keys[at] for at in places]
                )
            except BaseException:
                for at in places:
                    evictor.abort(names[at])
                raise
            for at, (result, why) in zip(places, outcomes, strict=True):
                stored[at] = result == OK
                (evictor.commit if stored[at] else evictor.abort)(names[at])
                if result == ENDLESS:
                    endless += 1
                elif not stored[at]:
                    failed.append((keys[at], why))
        if (index := self._backend.metadata_cache) is not None:
            for name, is_there in zip(names, stored, strict=True):
                (index.add if is_there else index.remove)(name)
        say_failed("are not stored", failed, len(keys))
        say_endless(endless, len(keys))
        return stored

    def _numbers(self, host_indices: Any) -> list[int]:
        return self._pool.page_layout.page_numbers(host_indices).tolist()  # type: ignore[no-any-return]
