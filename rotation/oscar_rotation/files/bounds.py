"""What a rotation file may state, and how a message quotes what it does state: bounded, on one line."""

from __future__ import annotations

import json
from typing import Any

MAX_LAYERS = 1024
"""Attention layers of a model, at most; the largest open models have some 130."""

MAX_HEAD_DIM = 1024
"""Channels of a head, at most; servers take 256 at most."""

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


def numbers(text: str) -> tuple[float, ...]:
    """A JSON list of numbers, one per layer.

    Raises:
        ValueError: anything else, or more than :data:`MAX_LAYERS`.
    """
    content = parsed(text)
    if not isinstance(content, list) or not all(type(x) in (int, float) for x in content):
        raise ValueError("expected a list of numbers")
    if len(content) > MAX_LAYERS:
        raise ValueError(f"{len(content)} numbers, at most {MAX_LAYERS} layers")
    try:
        return tuple(float(x) for x in content)
    except OverflowError:
        raise ValueError("a number out of range") from None


def strings(text: str) -> tuple[str, ...]:
    """A JSON list of strings, one per layer.

    Raises:
        ValueError: anything else, or more than :data:`MAX_LAYERS`.
    """
    content = parsed(text)
    if not isinstance(content, list) or not all(type(x) is str for x in content):
        raise ValueError("expected a list of strings")
    if len(content) > MAX_LAYERS:
        raise ValueError(f"{len(content)} strings, at most {MAX_LAYERS} layers")
    return tuple(content)
