"""Kernels that are built while requests wait: counted and named. There should be none, all are built before."""

from __future__ import annotations

import logging

import torch

from oscar_kernels import builds
from sglang_oscar import metrics

logger = logging.getLogger(__name__)

_total = 0


def begin(device: torch.device) -> None:
    """Begin to count, if that has not begun: a request gains a seat, that of SGLang's own warm-up first."""
    if device.type == "cuda":
        builds.listen(note)


def note(kernel: str, seconds: float) -> None:
    """Count a kernel, and say its name.

    Args:
        kernel: that was built.
        seconds: that it took.
    """
    global _total
    _total += 1
    metrics.count("late_kernels")
    logger.warning(
        "int2 kernel %s was built in %.2f s while requests waited (%d since the server began to serve)",
        kernel, seconds, _total,
    )  # fmt: skip
