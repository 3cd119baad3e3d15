"""Which layers of a model have a cache of which kind."""

from __future__ import annotations

from typing import Any

from sglang_oscar.formats.cached_layers import cached_layers_of_files


def cached_layers(model: Any) -> list[int]:
    """Layers that servers keep a quantized cache of, by their place among all; in most models these are all. Layers
    with a sliding window have none in models that are served so, unless ``windows_too`` of the model says otherwise."""
    config = model.config.get_text_config()
    if getattr(model, "windows_too", False):
        return list(range(config.num_hidden_layers))
    return list(cached_layers_of_files(config))


def all_layers_cached(model: Any) -> bool:
    """Whether a model has neither linear layers nor windows apart."""
    return len(cached_layers(model)) == int(model.config.get_text_config().num_hidden_layers)


def has_linear_layers(model: Any) -> bool:
    """Whether some layers keep a state in place of keys and values."""
    return "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())
