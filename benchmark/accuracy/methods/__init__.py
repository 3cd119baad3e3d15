"""Every method, by name. A module of this package that defines ``METHODS``, a list of factories, is in."""

from __future__ import annotations

import importlib
import pkgutil

from accuracy.methods.base import Method


def all_methods() -> dict[str, Method]:
    """Fresh instances of all methods, by name, in the order of the modules and of their lists.

    Raises:
        ValueError: two methods of one name.
    """
    found: dict[str, Method] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for factory in getattr(importlib.import_module(f"{__name__}.{module}"), "METHODS", []):
            method = factory()
            if method.name in found:
                raise ValueError(f"two methods are named {method.name}")
            found[method.name] = method
    return found
