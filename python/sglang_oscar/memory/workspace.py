"""Bytes that prompts take of the KV budget: FlashInfer's kernels and the prefixes that are dequantized for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.extend_plan import INT_WORKSPACE_BYTES


@dataclass(frozen=True)
class Workspace:
    """Memory of the FlashInfer backend.

    ``tokens`` of prefixes are dequantized at a time, up to ``passes`` times a layer, for ``q_heads`` query heads of
    this rank, in ``dtype``; ``kernels`` is FlashInfer's name for its kernel family and ``scratch_bytes`` what those
    need for partial results.
    """

    tokens: int
    token_bytes: int
    q_heads: int
    dtype: torch.dtype
    kernels: str
    scratch_bytes: int
    passes: int

    @property
    def total_bytes(self) -> int:
        """All of it, plans included."""
        return self.tokens * self.token_bytes + self.scratch_bytes + (1 + self.passes) * INT_WORKSPACE_BYTES

    def line(self) -> str:
        """For the start-up account."""
        gib = self.total_bytes / (1 << 30)
        return f"extend workspace: {gib:.3f} GiB; prefixes are read {self.tokens} tokens at a time"
