"""Bytes that attention takes of the KV budget besides windows and history: partial results, tables, matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Scratch:
    """What decode and verification need beside the cache, allocated once.

    ``partial_bytes`` says how much partial results of a step of so many requests take; ``request_bytes`` are those of a
    request in the tables of a step, and ``matrix_bytes`` those of all rotations, as files have them and as kernels read
    them.
    """

    partial_bytes: Callable[[int], int]
    request_bytes: int
    matrix_bytes: int

    def total_bytes(self, requests: int) -> int:
        """All of it, for steps of up to so many requests."""
        return self.partial_bytes(requests) + requests * self.request_bytes + self.matrix_bytes

    def line(self, requests: int) -> str:
        """For the start-up account."""
        partial, tables = self.partial_bytes(requests), requests * self.request_bytes
        return (
            f"decode workspace: {self.total_bytes(requests) / GIB:.3f} GiB (partial results {partial / GIB:.3f}, "
            f"tables {tables / GIB:.3f}, rotations {self.matrix_bytes / GIB:.3f})"
        )
