"""Models with linear layers between those of full attention: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, CONFIGURATOR, SRT, Touchpoint, at
from sglang_oscar.features.hybrids import known_name, pool, refusals, sizing

FEATURE = Feature(
    name="hybrids",
    in_schedulers=[
        Touchpoint(at(CONFIGURATOR + "_handle_max_mamba_cache"), AROUND, sizing.around_handle_max_mamba_cache),
        Touchpoint(
            at(SRT + "layers.attention.attention_registry.attn_backend_wrapper"), AROUND, known_name.around_wrapper
        ),
    ],
    architectures=refusals.MODELS,
    refused_with=[("Hybrid models", refusals.ARGUMENTS)],
    refused_models=["other models with linear attention"],
    check_model=refusals.check_model,
    parts=sizing.parts,
    owns=pool.owns,
    built=pool.built,
    restores_windows=pool.serves_hybrid,
)
