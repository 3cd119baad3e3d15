"""Which layers of a model keep keys and values: of a hybrid model those of full attention, of others all."""

from __future__ import annotations

from functools import cache
from typing import Any


def linear_config(model: Any) -> Any:
    """SGLang's configuration of the linear layers of a model; None where it has none.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model)


def attention_layer_ids(model: Any) -> tuple[int, ...]:
    """Global ids of the layers that keep keys and values, ascending.

    Args:
        model: SGLang's ModelConfig.
    """
    linear = linear_config(model)
    if linear is None:
        return tuple(range(model.num_hidden_layers))
    return tuple(sorted(linear.full_attention_layer_ids))


def cache_layer_ids(model: Any, begin: int, end: int) -> list[int]:
    """Global ids of those cache layers that lie within the model's layers ``begin`` to ``end - 1``."""
    if linear_config(model) is None:
        return list(range(begin, end))
    return [layer for layer in attention_layer_ids(model) if begin <= layer < end]


@cache
def serves_hybrid() -> bool:
    """Whether this process serves a hybrid model. In a worker only."""
    from sglang.srt.runtime_context import get_server_args

    from sglang_oscar.attach import releases

    return linear_config(releases.model_config(get_server_args())) is not None
