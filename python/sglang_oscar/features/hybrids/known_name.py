"""The name of our attention beside SGLang's linear layers: on Blackwell SGLang takes backends that it knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_oscar.formats.cached_layers import linear_config
from sglang_oscar.memory.cache import cache_of

KNOWN = "triton"
NAMES = ("prefill_attention_backend_str", "decode_attention_backend_str")
"""Attributes of a runner; older releases ask the server arguments."""


def around_wrapper(original: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """Let SGLang put linear layers beside ours."""
    if cache_of(runner.token_to_kv_pool) is None or linear_config(runner.model_config) is None:
        return original(runner, full_attn_backend)
    with under_a_known_name(runner):
        return original(runner, full_attn_backend)


@contextmanager
def under_a_known_name(runner: Any) -> Iterator[None]:
    """While inside, SGLang finds Triton's name in the place of ours. It compares names and builds nothing by them.

    Args:
        runner: SGLang's ModelRunner of a hybrid model whose attention is ours.
    """
    recent = hasattr(runner, NAMES[0])
    # Server arguments are sealed by now; theirs is a dictionary all the same.
    place = vars(runner) if recent else vars(runner.server_args)
    names = NAMES if recent else ("attention_backend",)
    before = {name: place[name] for name in names}
    place.update(dict.fromkeys(names, KNOWN))
    try:
        yield
    finally:
        place.update(before)
