"""What a rotation file may state, and how a message quotes what it does state: bounded, on one line."""

from __future__ import annotations

import json
from typing import Any

MAX_LAYERS = 1024
"""Attention layers of a model, at most; the largest open models have some 130."""

MAX_HEAD_DIM = 1024
"""Channels of a head, at most; servers take 256 at most."""

MAX_HEADS = 1024
"""kv heads of a layer, at most."""

_SHOWN = 60


def shown(value: Any) -> str:
    """A value out of a file for a message: one line of some 60 characters, whatever it is.

    >>> shown("layer"), shown(10**5000), shown([64, 64])
    ("'layer'", 'a number of 16610 bits', '[64, 64]')
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print thousands of digits
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, (bool, int, float)) or value is None:
        return repr(value)
    if isinstance(value, list) and len(value) <= 8 and all(type(item) is int for item in value):
        return f"[{', '.join(map(shown, value))}]"
    return f"a {type(value).__name__}"


def first_line(error: BaseException) -> str:
    """The first line of an error, 120 characters at most."""
    return next(iter(str(error).splitlines()), "").strip()[:120]


def parsed(text: str) -> Any:
    """JSON out of a file.

    Raises:
        ValueError: not JSON, nested deeper than Python reads, or a number of more digits than it reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def numbers(text: str, by_head: bool = False) -> tuple[Any, ...]:
    """A JSON list of numbers, one per layer; with ``by_head`` a layer may have a list of them.

    Raises:
        ValueError: anything else, or more than :data:`MAX_LAYERS`.
    """
    content = _listed(text, "numbers", (int, float), by_head)
    try:
        return tuple(tuple(map(float, x)) if isinstance(x, list) else float(x) for x in content)
    except OverflowError:
        raise ValueError("a number out of range") from None


def strings(text: str, by_head: bool = False) -> tuple[Any, ...]:
    """A JSON list of strings, one per layer; with ``by_head`` a layer may have a list of them.

    Raises:
        ValueError: anything else, or more than :data:`MAX_LAYERS`.
    """
    content = _listed(text, "strings", (str,), by_head)
    return tuple(tuple(x) if isinstance(x, list) else x for x in content)


def _listed(text: str, what: str, types: tuple[type, ...], by_head: bool) -> list[Any]:
    content = parsed(text)
    if not isinstance(content, list):
        raise ValueError(f"expected a list of {what}")
    for x in content:
        own = x if by_head and isinstance(x, list) else [x]
        if not own or len(own) > MAX_HEADS or not all(type(one) in types for one in own):
            raise ValueError(f"expected a list of {what}")
    if len(content) > MAX_LAYERS:
        raise ValueError(f"{len(content)} {what}, at most {MAX_LAYERS} layers")
    return content
