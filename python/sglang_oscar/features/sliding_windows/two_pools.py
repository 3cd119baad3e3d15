"""Models whose layers SGLang keeps in one pool, those with a sliding window among them: in int2 mode they have two.

SGLang says of each of these classes that two pools are not supported yet, because of an attention backend that is not
used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.formats.cached_layers import cached_layer_ids, window_layer_ids
from sglang_oscar.names import is_int2


def around_from_server_args(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's ModelConfig of server arguments, with two pools where int2 mode needs them."""
    model = original(server_args, *args, **kwargs)
    if is_int2(server_args) and not model.is_draft_model:
        give_two_pools(model)
    return model


def give_two_pools(model: Any) -> None:
    """Make SGLang keep layers with a window in a pool of their own.

    Args:
        model: SGLang's ModelConfig; it is written. One without such layers, or with two pools, is left as it is.
    """
    windows = window_layer_ids(model)
    if not windows or model.is_hybrid_swa:
        return
    full = cached_layer_ids(model)
    model.is_hybrid_swa, model.is_deepseek_v4_arch = True, False
    model.swa_attention_layer_ids, model.full_attention_layer_ids = list(windows), list(full)
