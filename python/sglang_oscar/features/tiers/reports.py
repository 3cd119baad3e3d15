"""What is said of a batch of pages: one line, however many there are."""

from __future__ import annotations

import logging

from sglang_oscar import metrics
from sglang_oscar.features.tiers.file_process import HANGING

logger = logging.getLogger(__name__)


def say_failed(what: str, failed: list[tuple[str, str]], count: int) -> None:
    """Say that pages could not be moved; nothing where their process hangs, which has been said once.

    Args:
        what: became of them.
        failed: key of each, and why.
        count: pages of the batch.
    """
    if failed and (why := failed[0][1]) != HANGING:
        key = failed[0][0][:12]
        logger.error("int2 storage: %d of %d pages %s; the first, %s: %s", len(failed), count, what, key, why)


def say_endless(endless: int, count: int) -> None:
    """Count pages that hold NaN, and say so: as those of a request whose activations overflowed.

    Args:
        endless: how many are not stored for that.
        count: pages of the batch.
    """
    metrics.count("nan_pages", endless)
    if endless:
        logger.warning("int2 storage: %d of %d pages are not stored, as they hold NaN", endless, count)
