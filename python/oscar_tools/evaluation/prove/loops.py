"""When an answer goes round in circles."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD, REPEATS, LEAST = 32, 3, 12
"""An answer loops if it ends in one n-gram of at most 32 tokens three times over, and at least 12 tokens of it."""


def loops(ids: Sequence[int]) -> bool:
    """Whether generated tokens end in a repetition.

    >>> loops([5, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]), loops([1, 1, 1]), loops(list(range(40)))
    (True, False, False)
    """
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(REPEATS * period, LEAST)
        tail = list(ids[-span:])
        if len(tail) == span and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False
