"""The life of a request: prefix hits, seats, sink blocks, and requests that come out as NaN."""

from __future__ import annotations

from sglang_oscar import metrics
from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AFTER, AROUND, BEFORE, MEM, REQUEST, SCHEDULER, Touchpoint, at
from sglang_oscar.requests import lifecycle, nan

FEATURE = Feature(
    name="requests",
    in_schedulers=[
        Touchpoint(at(SCHEDULER + "init_metrics_collector"), AFTER, metrics.after_init_metrics_collector),
        Touchpoint(at(REQUEST + "_compute_max_prefix_len"), AFTER, lifecycle.after_compute_max_prefix_len),
        Touchpoint(at(MEM + "allocation.alloc_for_extend"), AROUND, lifecycle.around_alloc_for_extend),
        Touchpoint(at(SCHEDULER + "run_batch"), AFTER, nan.after_run_batch),
        Touchpoint(at(SCHEDULER + "process_batch_result"), BEFORE, nan.before_process_batch_result),
        Touchpoint(
            at(MEM + "common.checkpoint_kv_cache", MEM + "common.maybe_cache_unfinished_req"),
            AROUND,
            nan.around_checkpoint,
        ),
    ],
    built=lambda built: lifecycle.observe(built.cache),
)
