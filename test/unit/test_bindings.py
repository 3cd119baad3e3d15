"""Hooked functions replace stock ones under all names, as SGLang's own walk through the modules does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_oscar.attach import bindings

PLACE = "oscar_hooked"
Walk = Callable[[object, object, object], int]
STOCK: Walk = hook_registry._propagate_patch


class Owner:
    """Has a function of every kind."""

    def method(self) -> str:
        return "stock"

    @classmethod
    def of_class(cls) -> str:
        return "stock"

    @staticmethod
    def static() -> str:
        return "stock"


def add(name: str, **values: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    return module


@pytest.fixture(params=["stock", "one walk"])
def modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Modules that know functions under other names, before SGLang's registry hooks these functions."""

    def function() -> str:
        return "stock"

    def other() -> str:
        return "stock"

    owner = type("Owner", (Owner,), dict(vars(Owner)))
    home = add(PLACE, function=function, other=other, Owner=owner, alias=function)
    user = add(f"{PLACE}_user", renamed=function, other=other, method=owner.method, number=3)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(hook_registry, "_propagate_patch", STOCK)
    if request.param == "one walk":
        names = ("function", "Owner.method", "Owner.of_class", "Owner.static", "nowhere")
        bindings.install([f"{PLACE}.{name}" for name in names])
    yield {"home": home, "user": user}
    for name in [name for name in sys.modules if name.startswith(PLACE)]:
        del sys.modules[name]


def hook(target: str) -> None:
    HookRegistry.register(f"{PLACE}.{target}", lambda original, *args: f"hooked {original(*args)}", HookType.AROUND)


def test_all_names_are_hooked(modules: dict[str, ModuleType]) -> None:
    """Those in modules that are imported between two hooks as well; a second name in a function's own module is not."""
    home, user = modules["home"], modules["user"]
    hook("function")
    HookRegistry.apply_hooks()
    late = add(f"{PLACE}_late", method=home.Owner.method)
    for target in ("Owner.method", "Owner.of_class", "Owner.static", "other", "nowhere"):
        hook(target)
    HookRegistry.apply_hooks()
    assert {f"{PLACE}.function", f"{PLACE}.other", f"{PLACE}.Owner.static"} <= HookRegistry._patched
    assert f"{PLACE}.nowhere" not in HookRegistry._patched
    assert home.function() == user.renamed() == "hooked stock"
    assert home.other() == user.other() == "hooked stock", "a function of another plugin"
    assert home.alias() == "stock"
    owner = home.Owner()
    assert owner.method() == user.method(owner) == late.method(owner) == "hooked stock"
    assert owner.of_class() == owner.static() == "hooked stock"
    assert user.number == 3


def test_a_name_that_is_hooked_itself_is_hooked_twice(modules: dict[str, ModuleType]) -> None:
    home, user = modules["home"], modules["user"]
    hook("function")
    HookRegistry.apply_hooks()
    HookRegistry.register(f"{PLACE}_user.renamed", lambda original: f"again {original()}", HookType.AROUND)
    HookRegistry.apply_hooks()
    assert user.renamed() == home.function() == "again hooked stock"
