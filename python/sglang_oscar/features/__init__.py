"""What the core serves besides plain models, a folder each: read its ``feature.py`` first. Nothing of the core imports
one, and none imports another."""

from __future__ import annotations

import importlib

CORE = ("attention", "rotation_source", "formats", "memory", "requests")
FEATURES = (
    "speculation", "tiers", "disaggregation", "sliding_windows", "hybrids", "resuming", "ranks", "recording",
    "refitting",
)  # fmt: skip
_registered = False


def register_all() -> None:
    """Register features, then rooms of the core: in this order they are asked. Does nothing when called again."""
    global _registered
    if _registered:
        return
    from sglang.srt.utils import is_cpu

    from sglang_oscar.attach.feature import register

    rooms = [*(f"sglang_oscar.features.{name}" for name in FEATURES), *(f"sglang_oscar.{name}" for name in CORE)]
    rooms += ["oscar_cpu"] if is_cpu() else []
    for feature in [importlib.import_module(f"{room}.feature").FEATURE for room in rooms]:
        register(feature)
    _registered = True
