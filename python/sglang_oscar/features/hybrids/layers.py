"""Whether a model has linear layers between those of full attention."""

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


@cache
def serves_hybrid() -> bool:
    """Whether this process serves a hybrid model. In a worker only."""
    from sglang.srt.runtime_context import get_server_args

    from sglang_oscar.attach import releases

    return linear_config(releases.model_config(get_server_args())) is not None
