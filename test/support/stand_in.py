"""Modules of the stand-in for sgl_kernel, without what importing the package does to torch."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from oscar_cpu.server import STAND_IN


@cache
def module(name: str) -> ModuleType:
    """A module of the package that imports none of its others."""
    spec = importlib.util.spec_from_file_location(f"stand_in_{name}", STAND_IN / "sgl_kernel" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
