"""Where rotations come from: found, or made, when nothing else stands in the way of a server."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.rotation_source import choice
from sglang_oscar.rotation_source.flags import recording_flags

FEATURE = Feature(name="rotation_source", before_resolution=recording_flags, settle=choice.choose)
