"""What takes of the KV budget besides rows and windows, a class a thing: rooms register theirs
(:class:`sglang_oscar.attach.feature.Feature`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_oscar.formats.geometry import Geometry


class Part:
    """Bytes and bounds of one thing; this one has none. Subclasses override what they have."""

    name = ""
    """What it is, as the subject of "takes so many GiB"."""
    flag: str | None = None
    """What an operator lowers to make it smaller."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes for every token of the history pool."""
        return 0

    def fixed_bytes(self, requests: int) -> int:
        """Bytes that do not depend on the history pool.

        Args:
            requests: that hold a window, running or waiting.
        """
        return 0

    @property
    def most_requests(self) -> int | None:
        """Requests that may run as far as this goes; None for any number."""
        return None

    @property
    def waiting(self) -> int:
        """Requests that hold a window beside the running ones."""
        return 0

    @property
    def copies(self) -> int:
        """Rings and sink blocks beside those of requests; their bytes are taken off the budget before it is planned."""
        return 0

    def lines(self, plan: Any, tokens: int) -> list[str]:
        """For the start-up account.

        Args:
            plan: the :class:`sglang_oscar.memory.plan.MemoryPlan` that this is a part of.
            tokens: capacity of the history pool.
        """
        return []


@dataclass(frozen=True)
class Sizing:
    """What rooms know when they say which parts a server needs.

    ``configurator`` is SGLang's KVCacheConfigurator, ``geometry`` of this rank, ``budget_bytes`` what cache and parts
    may take.
    """

    configurator: Any
    geometry: Geometry
    budget_bytes: int
