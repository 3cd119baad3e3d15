"""The places where the plugin touches SGLang exist in the installed release, and the flags are added once."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from sglang_oscar import SGLANG_VERSION, plugin
from sglang_oscar.attach import failure, flags, refusals, touchpoints
from sglang_oscar.errors import Int2Error

ALL = touchpoints.TOUCHPOINTS + touchpoints.DUMP_TOUCHPOINTS


def test_sglang_is_the_release_that_this_is_for() -> None:
    assert importlib.metadata.version("sglang").split("+")[0] == SGLANG_VERSION


def test_entry_point() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="oscar")
    assert [entry.value for entry in found] == ["sglang_oscar.plugin:register"]


def test_targets_are_listed_once() -> None:
    assert len({target for target, _, _ in ALL}) == len(ALL) > 20


@pytest.mark.parametrize(("target", "kind", "hook"), ALL, ids=[row[0].rpartition(".srt.")[2] for row in ALL])
def test_touchpoint_resolves(target: str, kind: HookType, hook: Any) -> None:
    """Target and hook agree on what they are called with, so far as the hook names its parameters."""
    place, _, name = target.rpartition(".")
    original = getattr(pkgutil.resolve_name(place), name)
    assert callable(original)
    parameters = list(inspect.signature(hook).parameters.values())
    if kind is not HookType.BEFORE:  # the original function, or its result, comes first
        parameters = parameters[1:]
    stock = inspect.signature(inspect.unwrap(original)).parameters
    for mine in parameters:
        if mine.kind in (mine.VAR_POSITIONAL, mine.VAR_KEYWORD):
            break
        assert mine.name in stock, f"{target} has no parameter {mine.name}"


def test_a_dropped_hook_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs and forgets a hook that it cannot attach; int2 mode must not start then."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = [target for target, _, _ in touchpoints.TOUCHPOINTS]
    monkeypatch.setattr(failure, "_error", None)
    monkeypatch.setattr(failure, "_expected", ())
    failure.expect(targets)
    monkeypatch.setattr(HookRegistry, "_patched", set(targets))
    assert failure.reason() is None
    monkeypatch.setattr(HookRegistry, "_patched", set(targets[1:]))
    assert failure.reason() == f"not attached: {targets[0]}"
    monkeypatch.setattr(failure, "SGLANG_VERSION", "9.9.9")
    assert "int2 mode needs sglang==9.9.9" in str(failure.reason())


@pytest.mark.parametrize("arguments", [["--model-path", "x"], ["--kv-cache-dtype", "int2"]])
@pytest.mark.parametrize("broken", ["flags", "release"])
def test_what_goes_wrong_is_told_only_to_who_asks(
    arguments: list[str], broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that does not ask for int2 never notices that the plugin cannot be installed."""
    monkeypatch.setattr(failure, "_error", None)
    monkeypatch.setattr(sys, "argv", ["launch_server.py", *arguments])
    if broken == "flags":
        monkeypatch.setattr(flags, "install", lambda: 1 / 0)
    else:
        monkeypatch.setattr(failure, "SGLANG_VERSION", "9.9.9")
        monkeypatch.setattr(touchpoints, "register_all", lambda hooks: pytest.fail("another release was hooked"))
    if "int2" not in arguments:
        plugin.register()
        assert capsys.readouterr() == ("", "")
        return
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert caught.value.code == 78
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("division by zero" if broken == "flags" else "needs sglang==9.9.9") in said


def test_attention_is_hooked_only_for_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUMP_KVCACHE", raising=False)
    assert touchpoints.wanted() == touchpoints.TOUCHPOINTS
    monkeypatch.setenv("DUMP_KVCACHE", "1")
    assert touchpoints.wanted() == ALL
    assert any("RadixAttention.forward" in target for target, _, _ in touchpoints.DUMP_TOUCHPOINTS)


def choices() -> list[str]:
    hint = get_type_hints(ServerArgs, include_extras=True)["kv_cache_dtype"]
    return next(extra.choices for extra in hint.__metadata__ if getattr(extra, "choices", None))


def test_flags_are_installed_once() -> None:
    flags.install()
    before = (list(ServerArgs.__dataclass_fields__), choices(), ServerArgs.__init__)
    flags.install()
    assert (list(ServerArgs.__dataclass_fields__), choices(), ServerArgs.__init__) == before
    assert choices().count("int2") == 1
    assert before[0].count("kv_cache_quant_group_size") == 1


def test_refusals_read_fields_that_exist() -> None:
    """A row that reads a field under a wrong name would raise here, not at somebody's start-up."""
    defaults = SimpleNamespace(**{name: field.default for name, field in ServerArgs.__dataclass_fields__.items()})
    refusals.check_arguments(defaults)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("logit_cap", 30.0, "soft-capping"),
        ("sliding_window_size", 4096, "sliding-window"),
        ("is_cross_attention", True, "cross attention"),
        ("attn_type", SimpleNamespace(name="ENCODER_ONLY"), "bidirectional"),
        ("xai_temperature_len", 8, "temperature"),
        ("use_irope", True, "iRoPE"),
    ],
)
def test_attention_layers(field: str, value: Any, what: str) -> None:
    plain = {
        "layer_id": 4,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(name="DECODER"),
        "xai_temperature_len": -1,
        "use_irope": False,
    }
    refusals.check_attention_layer(SimpleNamespace(**plain))
    with pytest.raises(Int2Error, match=f"{what}.*layer 4"):
        refusals.check_attention_layer(SimpleNamespace(**plain | {field: value}))
