"""Whether a model has linear layers between those of full attention."""

from __future__ import annotations

from functools import cache

from sglang_oscar.attach import releases
from sglang_oscar.formats.cached_layers import linear_config


@cache
def serves_hybrid() -> bool:
    """Whether this process serves a hybrid model. In a worker only."""
    from sglang.srt.runtime_context import get_server_args

    return linear_config(releases.model_config(get_server_args())) is not None
