"""Which layers of a model have an INT2 cache: those that attend to all tokens."""

from __future__ import annotations

from typing import Any


def cached_layer_ids(model: Any) -> tuple[int, ...]:
    """Global ids of the layers of a model whose cache is quantized, ascending.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang_oscar.features.hybrids.layers import linear_config

    if model.is_hybrid_swa:
        return tuple(sorted(model.full_attention_layer_ids))
    linear = linear_config(model)
    return tuple(range(model.num_hidden_layers) if linear is None else sorted(linear.full_attention_layer_ids))
