"""The tensor-parallel ranks of a server: all do the same, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sglang_oscar.errors import Int2Error

T = TypeVar("T")


class Ranks:
    """The ranks that got the same request.

    Args:
        group: of the CPU, of all of them.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group=group), dist.get_rank(group=group)

    def all(self, do: Callable[[], T]) -> T:
        """Do something on every rank.

        Returns:
            what this one made of it.

        Raises:
            Int2Error: on all of them, where it failed on any; the first of these says why.
        """
        result, fault = _tried(do)
        faults: list[Any] = [None] * self.size
        dist.all_gather_object(faults, fault, group=self._group)
        if (first := next(filter(None, faults), None)) is not None:
            raise Int2Error(first)
        return result  # type: ignore[return-value]

    def first(self, do: Callable[[], T]) -> T:
        """Do something on rank 0 and tell the others its result.

        Raises:
            Int2Error: on all of them, where it failed.
        """
        told: list[Any] = [_tried(do) if self.rank == 0 else None]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, told[0], group=self._group)
        result, fault = every[0]
        if fault is not None:
            raise Int2Error(fault)
        return result  # type: ignore[no-any-return]


def _tried(do: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return do(), None
    except Exception as error:  # whatever it is, other ranks wait to be told
        line = next(iter(str(error).splitlines()), "")
        return None, line if isinstance(error, Int2Error) else f"{type(error).__name__}: {line}"
