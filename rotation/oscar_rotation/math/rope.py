"""How a model turns its queries and keys by their position: facts of its configuration, and what follows from them.

The facts are few, JSON values, and enough to compute every frequency again, so that a rotation file can state which
embedding it was fitted for and a server can compare it with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

HALVES = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2",
    "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "glm4v_moe_text", "gpt_oss", "gemma3_text",
    "laguna", "mellum", "olmo2", "olmo3",
)  # fmt: skip
"""Model types whose rotary embedding pairs channel p with channel p + pairs. Those that read images turn text like the
others: its tokens have three equal coordinates."""

PLAIN = ("default", "mrope")
"""Kinds that scale nothing; the second is for coordinates of images and turns text like the first."""

SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""Kinds of scaled embedding whose frequencies are the same for requests of any length -> what they depend on."""

THETA = 10000.0
"""Base of the frequencies where a configuration names none."""

NAMES = ("rope_parameters", "rope_scaling")
"""Fields of a configuration with the facts of its embedding: of transformers 5, and of older releases."""

Rope = dict[str, Any]
"""``rope_type``, ``rope_theta``, ``rotary_dim`` (channels that turn), and of a scaled kind what :data:`SCALING` names
as far as it is stated, and ``max_position_embeddings``, which stands in for the original context where none is."""


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration under ``--json-model-override-args``, as SGLang applies them: objects are merged into objects.

    The embedding has two names; an override by one of them replaces what the configuration states by the other.

    >>> overridden({"rope_parameters": {"rope_theta": 1e6}}, {"rope_scaling": {"factor": 4.0}})
    {'rope_parameters': {'rope_theta': 1000000.0, 'factor': 4.0}}
    """
    found = dict(config)
    for name, value in overrides.items():
        before = found.get(name)
        if name in NAMES:
            before = _stated(found)
            found = {key: kept for key, kept in found.items() if key not in NAMES}
        merge = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[NAMES[0] if name in NAMES else name] = overridden(before or {}, value) if merge else value
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that concerns text, which is all of it for most models."""
    return config.get("text_config") or config.get("llm_config") or config


def context_of(config: Mapping[str, Any]) -> int:
    """Positions of a model by its configuration, counted as SGLang does.

    Args:
        config: of the text model.

    Raises:
        KeyError, TypeError, ValueError: it does not say.
    """
    facts = _stated(config)
    scaled = "original_max_position_embeddings" not in facts and _kind(facts) != "llama3"
    return int(config["max_position_embeddings"] * (facts.get("factor") or 1 if scaled else 1))


def rope_of(config: Mapping[str, Any], head_dim: int) -> Rope | None:
    """The facts of a model's embedding.

    Args:
        config: of the text model.
        head_dim: channels per head.

    Returns:
        None for a model or a kind of embedding that is not known here, or depends on the length of a request.

    Raises:
        AttributeError, TypeError, ValueError: the configuration is broken.
    """
    facts = _scaling(config)
    kind = _kind(facts)
    if config.get("model_type") not in HALVES or kind not in (*PLAIN, *SCALING):
        return None
    theta, channels = base_of(config, head_dim)
    rope: Rope = {
        "rope_type": "default" if kind in PLAIN else kind,
        "rope_theta": THETA if theta is None else theta,
        "rotary_dim": channels,
    }
    scaling = {name: facts[name] for name in SCALING.get(kind, ()) if facts.get(name) is not None}
    if scaling and "original_max_position_embeddings" not in scaling:
        scaling["max_position_embeddings"] = config.get("max_position_embeddings")
    return rope | scaling


def base_of(config: Mapping[str, Any], head_dim: int) -> tuple[float | list[float] | None, int]:
    """Base of the frequencies, of every layer where they differ, None where none is stated, and channels that turn:
    what no extension of the context changes.

    Args:
        config: of the text model.
        head_dim: channels per head.

    Raises:
        TypeError, ValueError: the configuration is broken.
    """
    facts = _scaling(config)
    theta = facts.get("rope_theta") or config.get("rope_theta")
    share = facts.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    channels = int(config.get("rotary_dim") or head_dim * float(share))
    if isinstance(theta, list):
        return [float(of_layer) for of_layer in theta], channels
    return None if theta is None else float(theta), channels


def turning(rope: Rope) -> tuple[torch.Tensor, float]:
    """Radians a token by pair, float64 [pairs], and the factor on cosines and sines."""
    theta, channels = rope["rope_theta"], rope["rotary_dim"]
    pairs = channels // 2
    if rope["rope_type"] == "default":
        return theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    facts = {name: value for name, value in rope.items() if name not in ("rotary_dim", "max_position_embeddings")}
    places = rope.get("max_position_embeddings") or rope["original_max_position_embeddings"]
    # By these names every release of transformers knows them.
    stated: Any = {"rope_theta": theta, "rope_scaling": facts}
    config = LlamaConfig(head_dim=channels, max_position_embeddings=places, **stated)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies.double(), float(factor)


def same_rope(stated: Rope, served: Rope | None) -> bool:
    """Whether two embeddings turn keys alike, however their facts are given.

    Args:
        stated: by a file, so that it may be anything.
        served: of a model; None where it is not known.
    """
    if served is None or stated == served:
        return stated == served
    if any(stated.get(name) != served[name] for name in ("rope_type", "rotary_dim")):
        return False
    try:
        (first, factor), (second, other_factor) = turning(stated), turning(served)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError):
        return False
    return torch.allclose(first, second, rtol=1e-4, atol=0) and abs(factor - other_factor) < 1e-4


def in_words(rope: Rope | None) -> str:
    """A few words for a message.

    >>> in_words({"rope_type": "yarn", "rope_theta": 1e6, "rotary_dim": 128, "factor": 4.0})
    'yarn, rope_theta 1e+06, factor 4'
    """
    if rope is None:
        return "one that is not known here"
    numbers = {name: rope[name] for name in ("rope_theta", "factor") if isinstance(rope.get(name), int | float)}
    kind = str(rope.get("rope_type"))[:20]
    return ", ".join(
        ["not scaled" if kind == "default" else kind, *(f"{name} {value:g}" for name, value in numbers.items())]
    )


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((config[name] for name in NAMES if config.get(name)), {})


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is stated of layers that attend to everything, which alone have rows."""
    stated = _stated(config)
    facts: Mapping[str, Any] = stated.get("full_attention") or stated
    return facts


def _kind(facts: Mapping[str, Any]) -> str:
    return facts.get("rope_type") or facts.get("type") or "default"
