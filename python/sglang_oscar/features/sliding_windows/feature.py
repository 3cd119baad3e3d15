"""Models with sliding-window layers beside those with an INT2 cache: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, MEM, SRT, Touchpoint, at
from sglang_oscar.features.sliding_windows import attention, models, pool, prefix_hits, sizing, two_pools

FEATURE = Feature(
    name="sliding_windows",
    in_arguments=[
        Touchpoint(
            at(SRT + "configs.model_config.ModelConfig.from_server_args"), AROUND, two_pools.around_from_server_args
        ),
    ],
    in_schedulers=[
        Touchpoint(at(MEM + "common.free_swa_out_of_window_slots"), AROUND, prefix_hits.around_free_out_of_window),
    ],
    refused_with=[("Models with sliding windows", models.REFUSED)],
    refused_models=["other models with sliding windows"],
    check_model=models.check,
    attends=models.is_served,
    configure=models.configure,
    cache_dtype=sizing.cache_dtype,
    parts=sizing.parts,
    pool_sizes=sizing.pool_sizes,
    wraps_attention=attention.around_wrapper,
    built=pool.built,
)
