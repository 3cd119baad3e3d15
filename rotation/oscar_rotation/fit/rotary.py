"""How a model turns its queries and keys, from its configuration: what a fit for a long context needs to know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.errors import DumpError
from oscar_rotation.math.positions import Positions

HALVES = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2",
    "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss",
)  # fmt: skip
"""Model types whose rotary embedding pairs channel p with channel p + pairs. Those that read images turn text like the
others: its tokens have three equal coordinates."""

SCALED = ("linear", "llama3", "yarn")
"""Kinds of scaled embedding whose frequencies are the same for requests of any length."""

THETA = 10000.0
"""Base of the frequencies where a configuration names none."""

MOST_POSITIONS = 32768
"""Positions that a fit is made for where nothing else is said, in models whose context is longer."""


def rotary_positions(model: Path, head_dim: int, context: int | None) -> Positions | None:
    """Where keys of a model may stand.

    Args:
        model: folder with config.json.
        head_dim: channels per head.
        context: positions; None for the model's own context, :data:`MOST_POSITIONS` at most.

    Returns:
        None if the configuration is missing or its kind of embedding is not known here.

    Raises:
        DumpError: config.json cannot be read.
    """
    path = model / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        if config.get("model_type") not in HALVES:
            return None
        own = int(config["max_position_embeddings"])
        frequencies = _frequencies(config, head_dim)
        if frequencies is None:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(
            f"{path}: its rotary embedding cannot be read ({error}); `oscar fit --context 0` does without"
        ) from error
    return Positions(frequencies, context or min(own, MOST_POSITIONS))


def _frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor | None:
    """Radians a token by pair, float64 [pairs]; None where they depend on the length of a request."""
    facts = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = facts.get("rope_type") or facts.get("type") or "default"
    if kind in ("default", "mrope"):  # coordinates of images, with the frequencies of text
        theta = float(facts.get("rope_theta") or config.get("rope_theta") or THETA)
        share = float(facts.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
        pairs = int(config.get("rotary_dim") or head_dim * share) // 2
        return theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    if kind not in SCALED:
        return None
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = AutoConfig.for_model(**config | {"head_dim": head_dim})
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"))
    return frequencies.double()
