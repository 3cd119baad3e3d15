"""Bytes that prompts take of the KV budget: a stock attention kernel and the prefixes that are dequantized for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.part import Part
from sglang_oscar.memory.plan import MemoryPlan

StockBackend = Literal["flashinfer", "fa3", "fa4"]
"""Backends of extend whose attention kernel is not ours."""
FLASH_ATTENTION = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
"""Those of SGLang, by their names for the log."""


@dataclass(frozen=True)
class ExtendWorkspace(Part):
    """Memory of prompts that are attended to by a stock kernel.

    ``tokens`` of prefixes are dequantized at a time, up to ``passes`` times a layer, for ``q_heads`` query heads of
    this rank, in ``dtype``. ``backend`` brings the kernel, of the family ``kernels``, which needs ``scratch_bytes`` for
    partial results and ``plan_bytes`` for every plan.
    """

    tokens: int
    token_bytes: int
    q_heads: int
    dtype: torch.dtype
    backend: StockBackend
    kernels: Literal["fa2", "fa3", "fa4"]
    scratch_bytes: int
    plan_bytes: int
    passes: int

    name = "the workspace of prompts"

    def fixed_bytes(self, requests: int = 1) -> int:
        """All of it, plans included, for any number of requests."""
        return self.tokens * self.token_bytes + self.scratch_bytes + (1 + self.passes) * self.plan_bytes

    @property
    def kernel(self) -> str:
        """The kernel's name for the log."""
        return FLASH_ATTENTION.get(self.backend, f"FlashInfer ({self.kernels})")

    def lines(self, plan: MemoryPlan, tokens: int) -> list[str]:
        """For the start-up account."""
        size = self.fixed_bytes() / GIB
        return [f"extend workspace: {size:.3f} GiB; prefixes are read {self.tokens} tokens at a time"]
