"""Which layers of a model have an INT2 cache: those that attend to all tokens.

In models of some classes, layers with a sliding window keep a cache of their own; in others they have none that SGLang
tells apart, and are cached like the rest. Told of SGLang's ModelConfig, and without SGLang of a model's files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

ONE_POOL = frozenset({
    "AfmoeForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM",
})  # fmt: skip
"""Classes whose layers SGLang keeps in one pool, those with a sliding window among them; Olmo 2 has no windows."""
TWO_POOLS = frozenset({
    "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "LagunaForCausalLM",
    "MellumForCausalLM", "MiMoV2FlashForCausalLM", "Spark2_5ForCausalLM", "Step3p5ForCausalLM",
})  # fmt: skip
"""Classes whose layers with a sliding window SGLang keeps in a pool of their own."""
WINDOWS_APART = ONE_POOL | TWO_POOLS
"""Classes with windows that int2 mode can serve; :mod:`sglang_oscar.attach.model_classes` says which were tried."""
NAMES_IN_FILES = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}
"""Classes that files call otherwise than SGLang does."""
FULL, WINDOW = "full_attention", "sliding_attention"
"""Kinds of layers in a model's configuration."""


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
    return _of_kinds((WINDOW,), getattr(model.hf_text_config, "layer_types", None) or (), model.num_hidden_layers)


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


def cached_layers_of_files(config: Any) -> tuple[int, ...]:
    """Global ids of the layers whose cache a server would quantize, ascending.

    Args:
        config: of a model's files: num_hidden_layers, and layer_types and architectures where it has them.
    """
    names = {NAMES_IN_FILES.get(name, name) for name in getattr(config, "architectures", None) or ()}
    cached = (FULL, WINDOW) if WINDOWS_APART.isdisjoint(names) else (FULL,)
    layers: int = config.num_hidden_layers
    return _of_kinds(cached, getattr(config, "layer_types", None) or [FULL] * layers, layers)


def _of_kinds(wanted: Collection[str], kinds: Sequence[str], layers: int) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds[:layers]) if kind in wanted)
