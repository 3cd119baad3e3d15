"""A release of SGLang that is newer than what was tested: refused, unless somebody asks for it and all reads back."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_oscar import SGLANG_VERSIONS, plugin
from sglang_oscar.attach import bindings, failure, flags, newer, processes, touchpoints
from sglang_oscar.attach.touchpoint import Touchpoint

PLACE = "sglang.srt.server_args.prepare_server_args"


def hook(original: Any, argv: Any) -> None: ...


def hook_of_more(original: Any, argv: Any, brand_new: Any) -> None: ...


def point(target: str, taken: Any = hook) -> Touchpoint:
    return Touchpoint((target,), HookType.AROUND, taken)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """SGLang calls itself 9.9.9, and nothing went wrong so far."""
    monkeypatch.setattr(failure.importlib.metadata, "version", lambda name: "9.9.9")
    for name, value in (("_error", None), ("_expected", ()), ("_absent", list), ("_strange", plugin._strange)):
        monkeypatch.setattr(failure, name, value)
    monkeypatch.delenv(failure.ALLOW_NEWER, raising=False)
    return monkeypatch


def test_what_reads_back() -> None:
    assert newer.strange([point(PLACE)]) == []
    assert newer.strange([point(PLACE, hook_of_more)]) == [f"{PLACE} (no parameter brand_new)"]
    gone = "sglang.srt.server_args.gone"
    assert newer.strange([point(gone)]) == [gone]
    assert newer.strange() == []  # of the installed release, which was tested


@pytest.mark.parametrize(
    ("strange", "said"),
    [
        ([], "all touch points read back: SGLANG_OSCAR_ALLOW_NEWER=1 serves it, untested"),
        (["sglang.a", "sglang.b (no parameter c)"], "touch points that do not read back: sglang.a, sglang.b (no param"),
        (ImportError("no module\nand more"), "its touch points cannot be read (ImportError: no module)"),
    ],
)
def test_the_refusal_says_what_is_there(installed: pytest.MonkeyPatch, strange: Any, said: str) -> None:
    def told() -> list[str]:
        if isinstance(strange, Exception):
            raise strange
        return list(strange)

    installed.setattr(newer, "strange", told)
    reason = failure.reason()
    assert reason is not None
    assert reason.startswith(f"sglang 9.9.9 is installed, int2 mode needs {failure.supported()}; {said}")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("version", "value", "served"),
    [
        ("9.9.9", "1", True),
        ("9.9.9rc1", "true", True),
        ("9.9.9", "0", False),
        ("9.9.9", "", False),
        ("0.5.16", "1", False),
        (f"{SGLANG_VERSIONS[-1]}rc1", "1", False),
    ],
)
def test_only_a_newer_one_is_allowed(installed: pytest.MonkeyPatch, version: str, value: str, served: bool) -> None:
    installed.setattr(failure.importlib.metadata, "version", lambda name: version)
    installed.setenv(failure.ALLOW_NEWER, value)
    assert (failure.unsupported_release() is None) == served


@pytest.mark.parametrize("value", ["1", None])
def test_what_does_not_read_back_is_refused_where_it_is_allowed(installed: pytest.MonkeyPatch, value: str) -> None:
    """A hook that would attach by its name, with other parameters."""
    if value:
        installed.setenv(failure.ALLOW_NEWER, value)
    later = point("sglang.srt.utils.is_cpu", hook_of_more)
    installed.setattr(sys, "argv", ["launch_server.py"])
    for place, name in ((flags, "install"), (processes, "begin")):
        installed.setattr(place, name, lambda: None)
    installed.setattr(processes, "schedules", lambda: False)
    installed.setattr(touchpoints, "of_arguments", lambda: [point(PLACE)])
    installed.setattr(touchpoints, "of_scheduler", lambda int2: [later])
    installed.setattr(touchpoints, "register_all", lambda points: [PLACE])
    installed.setattr(bindings, "install", lambda targets: None)
    installed.setattr(HookRegistry, "_patched", {PLACE})
    plugin.register()
    reason = str(failure.reason())
    assert reason.endswith("sglang.srt.utils.is_cpu (no parameter argv, brand_new)")
    assert ("not attached: " in reason) == bool(value)
