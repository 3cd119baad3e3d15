"""Other names of hooked functions, all found in one walk through the modules of a process.

A module that has imported a function by name keeps the stock one when it is hooked in its own module, so SGLang's
registry walks through all modules for every function that it hooks. With some thirty of them and the 290,000 names that
a scheduler has imported, that is two seconds of one core. Here the names are collected once, for all functions that
are going to be hooked; those of other plugins are SGLang's to find, as ever.
"""

from __future__ import annotations

import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from sglang_oscar.attach import releases


class Bindings:
    """Takes the place of the registry's walk.

    Args:
        targets: dotted names of the functions that are going to be hooked.
        walk: SGLang's, for all others.
    """

    def __init__(self, targets: Iterable[str], walk: Callable[[object, object, object], int]) -> None:
        self._walk = walk
        # Kept alive with their numbers, so that no other object can get one.
        self._functions = {id(function): function for function in map(function_at, targets)}
        self._places: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        self._seen: set[int] = set()
        self._modules = 0

    def __call__(self, original: object, wrapped: object, source_module: object) -> int:
        """Put a hooked function in the place of the stock one, in all modules but its own.

        Args:
            original: the stock function.
            wrapped: the hooked one.
            source_module: its own module or class, which has it already.

        Returns:
            the number of names that were changed.
        """
        if id(original) not in self._functions:
            return self._walk(original, wrapped, source_module)
        self._look_through_new_modules()
        changed = 0
        for module, name in self._places[id(original)]:
            if module is not source_module and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                changed += 1
        return changed

    def _look_through_new_modules(self) -> None:
        if len(sys.modules) == self._modules:  # Hooking imports modules, and removes none.
            return
        modules = list(sys.modules.values())
        self._modules = len(modules)
        for module in modules:
            if isinstance(module, ModuleType) and id(module) not in self._seen:
                self._seen.add(id(module))
                if self._functions.keys().isdisjoint(map(id, list(vars(module).values()))):
                    continue
                for name, value in list(vars(module).items()):
                    if id(value) in self._functions:
                        self._places[id(value)].append((module, name))


def function_at(target: str) -> Any:
    """The function of a dotted name, as the registry takes it: of a class or static method what is inside."""
    place, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(place)
    found = vars(owner).get(name) if isinstance(owner, type) else None
    return found.__func__ if isinstance(found, classmethod | staticmethod) else getattr(owner, name)


def install(targets: Iterable[str]) -> None:
    """Let the registry find the names of these functions in one walk.

    Args:
        targets: dotted names; those that do not exist are left to the registry, which reports them.
    """
    from sglang.srt.plugins import hook_registry

    hook_registry._propagate_patch = Bindings(filter(releases.exists, targets), hook_registry._propagate_patch)
