"""Many questions in one prompt, so that the one that is asked for lies where an int2 server reads 2 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST, LAST = 64, 512
"""Tokens at either end of a prompt in which nothing is asked: the sink of an int2 server, and what it may compute again
behind a cached prefix (:data:`asking.SLACK`), its recent window in it."""


@dataclass(frozen=True)
class Group:
    """Questions of one prompt.

    Attributes:
        order: all of them, as they stand in the prompt.
        asked: those that are asked for, a part of ``order``.
    """

    order: tuple[int, ...]
    asked: tuple[int, ...]


def bury(sizes: Sequence[int], asked: Sequence[int], before: int, budget: int) -> list[Group]:
    """Spread questions over prompts. Each is asked in one of them; others of the file fill what lies around.

    Args:
        sizes: tokens of every question of the file.
        asked: numbers of those to ask, ascending.
        before: tokens of a prompt in front of the first question.
        budget: tokens of all questions of a prompt, about.

    Returns:
        the prompts. In front of an asked question stand :data:`FIRST` tokens at least, behind it :data:`LAST` of other
        questions, and no question stands twice.

    Raises:
        ValueError: the file has too few questions for that, or the budget is too small.
    """
    return list(_groups(sizes, asked, before, budget))


def _groups(sizes: Sequence[int], asked: Sequence[int], before: int, budget: int) -> Iterator[Group]:
    at = 0
    while at < len(asked):
        made = None
        for end in range(at + 1, len(asked) + 1):
            more = _around(sizes, asked[at:end], before, budget)
            if more is None:
                break
            made = more
        if made is None:
            raise ValueError(
                f"{len(sizes)} questions of {sum(sizes)} tokens cannot bury one: {FIRST} tokens in front of it and "
                f"{LAST} behind it must be of others, within {budget} tokens"
            )
        yield made
        at += len(made.asked)


def _around(sizes: Sequence[int], group: Sequence[int], before: int, budget: int) -> Group | None:
    """Questions around those that are asked; None where there is too little."""
    inside = set(group)
    # The file goes on behind the group, and from its beginning.
    free = [i % len(sizes) for i in range(group[-1] + 1, group[-1] + 1 + len(sizes))]
    others = [i for i in free if i not in inside]
    front: list[int] = []
    while others and before + sum(sizes[i] for i in front) < FIRST:
        front.append(others.pop())
    room = budget - sum(sizes[i] for i in (*front, *group))
    back: list[int] = []
    held = 0
    for i in others:
        if held >= LAST and held + sizes[i] > room:
            break
        back.append(i)
        held += sizes[i]
    enough = before + sum(sizes[i] for i in front) >= FIRST and held >= LAST and held <= room
    return Group((*front, *group, *back), tuple(group)) if enough else None
