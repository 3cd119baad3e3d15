"""What a release of SGLang that nobody has tested has of the touch points: names, and parameters that hooks take.

That says nothing of what the functions do: such a release serves only where the operator says so
(:data:`sglang_oscar.attach.failure.ALLOW_NEWER`).
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable

from sglang.srt.plugins.hook_registry import HookType

from sglang_oscar.attach import releases, touchpoints
from sglang_oscar.attach.touchpoint import Touchpoint


def strange(points: Iterable[Touchpoint] | None = None) -> list[str]:
    """Touch points that the installed release does not have as they are known, each with what is missing.

    Args:
        points: those of int2 servers by default.
    """
    if points is None:
        points = touchpoints.of_arguments() + touchpoints.of_scheduler(int2=True)
    return [found for point in points if (found := _missing(point)) is not None]


def _missing(point: Touchpoint) -> str | None:
    target = releases.first_existing(point.targets)
    if target is None:
        return point.name
    parameters = list(inspect.signature(point.hook).parameters.values())
    if point.kind is not HookType.BEFORE:  # the original function, or its result, comes first
        parameters = parameters[1:]
    stock = inspect.signature(inspect.unwrap(pkgutil.resolve_name(target))).parameters
    named = [mine.name for mine in parameters if mine.kind is mine.POSITIONAL_OR_KEYWORD]
    lacks = [name for name in named if name not in stock]
    return f"{target} (no parameter {', '.join(lacks)})" if lacks else None
