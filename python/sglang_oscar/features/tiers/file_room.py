"""Room for files of pages, within the bounds that SGLang sets a folder: ``max_size`` and ``min_free_space``.

SGLang reserves room for a page, writes it, and reserves room for the next. Files that a process writes come in groups,
so that it is asked seldom. What is reserved and not written yet can neither be evicted nor seen as used by the
operating system: a group is only as large as fits with all of it written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def reserved_groups(evictor: Any, names: list[str], keys: list[str], size: int) -> Iterator[list[int]]:
    """Reserve room for pages group by group. The caller writes a group, and commits or aborts it, before the next one.

    Ends before the first page for which SGLang has no room, and has said so: those behind it would not be found
    without it.

    Args:
        evictor: SGLang's LRUFileEvictor.
        names: of files.
        keys: which SGLang names in its log.
        size: bytes of a page.

    Yields:
        positions among the names, of one group.
    """
    group: list[int] = []
    for at, (name, key) in enumerate(zip(names, keys, strict=True)):
        if group and not _fits(evictor, len(group) * size, size):
            yield group
            group = []
        if not group and not _fits(evictor, 0, size):
            _evict(evictor, size, (len(names) - at) * size)
        if not evictor.reserve(name, size, key=key):
            break
        group.append(at)
    if group:
        yield group


def _fits(evictor: Any, unwritten: int, size: int) -> bool:
    """Whether one page more fits without evicting anything, beside those reserved but not written."""
    if evictor.max_size_bytes > 0 and evictor._total_bytes + size > evictor.max_size_bytes:
        return False
    if evictor.min_free_bytes <= 0 or (known := evictor._fs_stats()) is None:
        return True
    return bool(known[1] - unwritten - size >= evictor.min_free_bytes)


def _evict(evictor: Any, size: int, wanted: int) -> None:
    """Make room for a group rather than a page, for otherwise each page of a folder that is full is a group.

    No more than half of what is there: of many pages in a small folder the last ones stay, as with SGLang.
    """
    if 0 < evictor.max_size_bytes < size:
        return  # SGLang refuses such a page; nothing would be gained
    room = max(size, min(wanted, evictor._total_bytes // 2))
    with evictor._lock:
        if 0 < evictor.max_size_bytes < evictor._total_bytes + size:
            kept = min(int(evictor.max_size_bytes * evictor.eviction_ratio) - size, evictor.max_size_bytes - room)
            evictor._evict_while(lambda _: evictor._total_bytes > kept)
        evictor._enforce_free_space_locked(room)
