"""Attention of hybrid models: SGLang's linear layers beside ours, and windows kept where it keeps states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.features.hybrids.known_name import under_a_known_name
from sglang_oscar.formats.cached_layers import linear_config
from sglang_oscar.memory.cache import cache_of


def around_wrapper(original: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """Let SGLang put linear layers beside ours; in its place is a class of ours, of the same parts."""
    if cache_of(runner.token_to_kv_pool) is None or linear_config(runner.model_config) is None:
        return original(runner, full_attn_backend)
    from sglang_oscar.features.hybrids.verified_states import KeepsWindows

    with under_a_known_name(runner):
        stock = original(runner, full_attn_backend)
    try:
        return KeepsWindows.in_place_of(stock)
    except Int2Error as error:
        fatal(error)
