"""Models with linear layers between those of full attention: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, CONFIGURATOR, SCHEDULER, Touchpoint, at
from sglang_oscar.features.hybrids import attention, pool, refusals, retraction, sizing

FEATURE = Feature(
    name="hybrids",
    in_schedulers=[
        Touchpoint(at(CONFIGURATOR + "_handle_max_mamba_cache"), AROUND, sizing.around_handle_max_mamba_cache),
        Touchpoint(at(SCHEDULER + "update_running_batch"), AROUND, retraction.around_update_running_batch),
    ],
    architectures=refusals.MODELS,
    refused_with=[
        ("Hybrid models", refusals.ARGUMENTS),
        ("Those of Mamba2", refusals.MAMBA2_ARGUMENTS),
    ],
    refused_models=["other models with linear attention"],
    check_model=refusals.check_model,
    parts=sizing.parts,
    wraps_attention=attention.around_wrapper,
    owns=pool.owns,
    built=pool.built,
    restores_windows=pool.serves_hybrid,
)
