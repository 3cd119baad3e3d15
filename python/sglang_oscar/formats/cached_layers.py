"""Which layers of a model have an INT2 cache: those that attend to all tokens."""

from __future__ import annotations

from typing import Any

ONE_POOL = frozenset({
    "AfmoeForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM",
})  # fmt: skip
"""Classes whose layers SGLang keeps in one pool, those with a sliding window among them. Olmo 3 is an Olmo2ForCausalLM;
Olmo 2 has no windows."""


def linear_config(model: Any) -> Any:
    """SGLang's configuration of the linear layers of a model; None where it has none.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model)


def window_layer_ids(model: Any) -> tuple[int, ...]:
    """Global ids of the layers of a model with a sliding window, ascending.

    Args:
        model: SGLang's ModelConfig.
    """
    if model.is_hybrid_swa:
        return tuple(sorted(model.swa_attention_layer_ids))
    if ONE_POOL.isdisjoint(model.hf_config.architectures):
        return ()
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(kinds[: model.num_hidden_layers]) if kind == "sliding_attention")


def cached_layer_ids(model: Any) -> tuple[int, ...]:
    """Global ids of the layers of a model whose cache is quantized, ascending.

    Args:
        model: SGLang's ModelConfig.
    """
    if model.is_hybrid_swa:
        return tuple(sorted(model.full_attention_layer_ids))
    if (linear := linear_config(model)) is not None:
        return tuple(sorted(linear.full_attention_layer_ids))
    windows = set(window_layer_ids(model))
    return tuple(layer for layer in range(model.num_hidden_layers) if layer not in windows)
