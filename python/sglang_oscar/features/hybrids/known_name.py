"""The name of our attention beside SGLang's linear layers: on Blackwell SGLang takes backends that it knows by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KNOWN = "triton"
NAMES = ("prefill_attention_backend_str", "decode_attention_backend_str")
"""Attributes of a runner; older releases ask the server arguments."""


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
