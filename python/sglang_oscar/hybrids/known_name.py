"""The name of our attention beside SGLang's linear layers: on Blackwell SGLang takes backends that it knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_oscar.attach import releases

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
    place: Any = runner if recent else runner.server_args
    names = NAMES if recent else ("attention_backend",)
    write: Callable[[Any, str, Any], None] = setattr if recent else releases.write
    before = [getattr(place, name) for name in names]
    for name in names:
        write(place, name, KNOWN)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            write(place, name, value)
