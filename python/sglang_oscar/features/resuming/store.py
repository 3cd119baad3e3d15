"""Which recent windows are kept, found by the tokens that they belong to: on the host, the same on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

TAIL = 32
"""Tokens that are compared before all are: windows of other beginnings differ in them, as a rule."""


@dataclass(frozen=True, eq=False)
class Window:
    """A copy of the ring of a request with the tokens ``ids``, whole pages, of name space ``space``: in ``slot``, from
    position ``start`` to the last of them. What the ring held behind it is not read.
    """

    slot: int
    space: Hashable
    ids: Sequence[int]
    start: int


class WindowStore:
    """At most ``slots`` windows; the least recently used one that is not pinned makes room for another."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._windows: OrderedDict[int, Window] = OrderedDict()
        self._free = list(range(self.slots - 1, -1, -1))
        self._pinned: dict[int, Window] = {}

    def add(self, space: Hashable, ids: Sequence[int], start: int) -> Window | None:
        """A window that is about to be copied to its slot, in place of one of the same tokens that begins later; None
        where one is there that begins no later, or where all slots are pinned.
        """
        for one in [one for one in self._windows.values() if one.space == space and one.ids == ids]:
            if one.start <= start:
                self._windows.move_to_end(one.slot)
                return None
            self.drop(one)
        if not self._free:
            oldest = next((one for slot, one in self._windows.items() if slot not in self._pinned), None)
            if oldest is None:
                return None
            self.drop(oldest)
        window = Window(self._free.pop(), space, ids, start)
        self._windows[window.slot] = window
        return window

    def find(self, space: Hashable, ids: Sequence[int], latest_start: int) -> Window | None:
        """The longest window that a request with these tokens can go on from.

        Args:
            space: name space of the request.
            ids: its tokens.
            latest_start: position at which the window has to begin at the latest.
        """
        fitting = [one for one in self._windows.values() if one.space == space and one.start <= latest_start]
        for one in sorted(fitting, key=lambda one: -len(one.ids)):
            end = len(one.ids)
            if end <= len(ids) and one.ids[-TAIL:] == ids[max(end - TAIL, 0) : end] and one.ids == ids[:end]:
                return one
        return None

    def pin(self, window: Window) -> None:
        """Leave a window that was found in its slot until :meth:`unpin`."""
        self._pinned[window.slot] = window
        self._windows.move_to_end(window.slot)

    def unpin(self) -> None:
        """Nobody counts on any window any more; slots of those that were dropped meanwhile are free."""
        self._free += [slot for slot in self._pinned if slot not in self._windows]
        self._pinned.clear()

    def holds(self, window: Window) -> bool:
        """Whether the slot of a window that was found still holds it."""
        return window in (self._windows.get(window.slot), self._pinned.get(window.slot))

    def drop(self, window: Window) -> None:
        """Let nobody find a window any more, if it is still there."""
        if self._windows.get(window.slot) is window:
            del self._windows[window.slot]
            if window.slot not in self._pinned:
                self._free.append(window.slot)
