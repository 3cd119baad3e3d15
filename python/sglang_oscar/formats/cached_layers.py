"""Which layers of a model have an INT2 cache: those that attend to all tokens."""

from __future__ import annotations

from typing import Any


def linear_config(model: Any) -> Any:
    """SGLang's configuration of the linear layers of a model; None where it has none.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model)


def cached_layer_ids(model: Any) -> tuple[int, ...]:
    """Global ids of the layers of a model whose cache is quantized, ascending.

    Args:
        model: SGLang's ModelConfig.
    """
    if model.is_hybrid_swa:
        return tuple(sorted(model.full_attention_layer_ids))
    linear = linear_config(model)
    return tuple(range(model.num_hidden_layers) if linear is None else sorted(linear.full_attention_layer_ids))
