"""Small models of the classes that have layers with a sliding window, as configurations for weights that are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.releases import tree  # noqa: F401 - finds scripts

from model_classes import shapes  # isort: skip

DRAWN = ("--load-format", "dummy", "--trust-remote-code")
"""Arguments of a server with ``drawn_weights_plugin``: its weights are drawn by their names, and configurations may
name a class of SGLang."""
BY_LAYER = (
    "layer_types", "mlp_layer_types", "num_attention_heads_per_layer", "rope_theta", "partial_rotary_factors",
    "swiglu_limits", "swiglu_limits_shared", "hybrid_layer_pattern", "moe_layer_freq", "layer_rope_theta",
)  # fmt: skip
"""What configurations have a list of, with an entry for every layer."""


def save(name: str, folder: Path, **overrides: Any) -> Path:
    """Write the configuration of a class to ``folder`` and return it: four layers, every other one with a window."""
    shapes.save(name, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {key: config[key] * 2 for key in BY_LAYER if isinstance(config.get(key), list)}
    config |= {"num_hidden_layers": 4, "max_position_embeddings": 8192} | overrides
    (folder / "config.json").write_text(json.dumps(config))
    return folder
