"""Where rotations come from: found, or made, when nothing else stands in the way of a server."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach.feature import Feature
from sglang_oscar.rotation_source import choice
from sglang_oscar.rotation_source.flags import recording_flags
from sglang_oscar.settings import Settings


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse what the environment names and is not there, before anything that takes time.

    Raises:
        Int2Error: see :func:`sglang_oscar.rotation_source.choice.of_variables`.
    """
    choice.of_variables(settings)


FEATURE = Feature(
    name="rotation_source",
    check=check,
    before_resolution=recording_flags,
    settle=choice.choose,
)
