"""Kernels that are built while requests wait: counted and named. There should be none, all are built before."""

from __future__ import annotations

import logging
from typing import Any

from oscar_kernels import builds
from sglang_oscar import metrics

logger = logging.getLogger(__name__)

_total = 0


def before_run_event_loop(self: Any, *args: Any, **kwargs: Any) -> None:
    """Begin to count: a scheduler is about to take requests, that of SGLang's own warm-up first.

    Args:
        self: SGLang's Scheduler.
    """
    if self.device == "cuda":
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
