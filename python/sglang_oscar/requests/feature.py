"""The life of a request: prefix hits, seats, sink blocks, and requests that come out as NaN."""

from __future__ import annotations

from typing import Any

from sglang_oscar import metrics
from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AFTER, AROUND, BEFORE, MEM, REQUEST, SCHEDULER, Touchpoint, at
from sglang_oscar.requests import lifecycle, nan


def after_run_batch(result: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Begin to publish metrics, with the labels of this scheduler, and look at what came out."""
    metrics.begin(self)
    nan.after_run_batch(result, self, batch)


FEATURE = Feature(
    name="requests",
    in_schedulers=[
        Touchpoint(at(REQUEST + "_compute_max_prefix_len"), AFTER, lifecycle.after_compute_max_prefix_len),
        Touchpoint(at(MEM + "allocation.alloc_for_extend"), AROUND, lifecycle.around_alloc_for_extend),
        Touchpoint(at(SCHEDULER + "run_batch"), AFTER, after_run_batch),
        Touchpoint(at(SCHEDULER + "process_batch_result"), BEFORE, nan.before_process_batch_result),
        Touchpoint(
            at(MEM + "common.checkpoint_kv_cache", MEM + "common.maybe_cache_unfinished_req"),
            AROUND,
            nan.around_checkpoint,
        ),
    ],
    built=lambda built: lifecycle.observe(built.cache),
)
