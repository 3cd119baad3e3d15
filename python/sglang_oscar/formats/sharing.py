"""One key transform for all kv heads of a layer, or one for each: when to warn of the former."""

from __future__ import annotations

from collections.abc import Mapping

from oscar_kernels.format import AnyFormat
from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.settings import Settings

FEW_HEADS = 4
"""kv heads of a layer up to which a shared file is warned of; models with eight keep their accuracy with one rotation
per layer."""


def sharing_warning(settings: Settings, formats: Mapping[int, AnyFormat]) -> str | None:
    """What to warn of where a file with one key transform per layer serves a model with few kv heads.

    Keys decide: values of every recipe but ``paper`` are one per layer. Built-in recipes know no heads.

    Args:
        settings: where the rotations come from.
        formats: of all layers, with all kv heads of the model.

    Returns:
        one line, or None where there is nothing to warn of.
    """
    if settings.k_rotation is None or settings.k_rotation in BUILT_IN:
        return None
    keys = [(layer.kv_heads, part.key.transform) for layer in formats.values() for part in layer.parts]
    heads = max((heads for heads, key in keys if key.matrix is not None and not key.per_head), default=0)
    if not 1 < heads <= FEW_HEADS:
        return None
    return (
        f"{settings.k_rotation} has one key transform per layer for {heads} kv heads; one per kv head would lose less, "
        "on some models much less (OSCAR's authors on Qwen3-30B-A3B, 4 kv heads: perplexity +16.6% against +0.35%); "
        "fit it with `oscar fit --recipe focus`, or `oscar fit --recipe paper --share kv_head`"
    )
