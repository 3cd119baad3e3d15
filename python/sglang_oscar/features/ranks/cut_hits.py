"""Prefix hits of ranks that cannot refill a sink block: they hit where its block is there, and nowhere else.

Nothing comes between a match and the row: SGLang matches a prompt again whenever it makes a batch, and the batch pins
the blocks of its hits before any other gets one.
"""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.features.ranks.arguments import kind
from sglang_oscar.memory.build import Built
from sglang_oscar.memory.cache import Int2Cache

_cache: Int2Cache | None = None
"""Of the pool of this process that requests of a server are in."""


def built(of: Built) -> None:
    """Begin to cut hits, where ranks run batches of their own."""
    global _cache
    if kind(releases.resolved(of.configurator.server_args)) is not None:
        of.cache.cuts_hits = True
        _cache = of.cache


def longest_hit(req: Any, input_len: int) -> int:
    """Tokens up to which a hit of a request of ``input_len`` tokens may reach: none without its sink block."""
    if _cache is None or _cache.plan.geometry.windows.sink == 0 or _cache.sinks.holds(_cache.sink_key(req)):
        return input_len
    return 0
