"""The places where the plugin touches SGLang exist in the installed release, and the flags are added once."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import pickle
import pkgutil
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import pytest
from sglang.srt.arg_groups import arg_utils
from sglang.srt.arg_groups.arg_utils import Arg
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from sglang_oscar import SGLANG_VERSIONS, plugin
from sglang_oscar.attach import failure, flags, refusals, releases, touchpoints
from sglang_oscar.attach.feature import features
from sglang_oscar.attach.touchpoint import Touchpoint
from sglang_oscar.errors import Int2Error
from sglang_oscar.features import register_all
from sglang_oscar.features.recording.feature import FEATURE as RECORDING

register_all()
assert RECORDING.any_server is not None
DUMPING = list(RECORDING.any_server.in_schedulers)
SERVING = [point for feature in features() for point in feature.in_schedulers]
ALL = [*touchpoints.of_arguments(), *SERVING, *DUMPING]


def test_sglang_is_a_release_that_this_is_for() -> None:
    assert failure.unsupported_release() is None


def test_entry_point() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="oscar")
    assert [entry.value for entry in found] == ["sglang_oscar.plugin:register"]


MOST_SERVING = 37
"""Functions of SGLang that schedulers of int2 mode hook on a GPU."""


def test_rooms_list_a_function_once() -> None:
    """Two rooms may hook the same one, and do so by the same names."""
    for points in ([*touchpoints.GATE], *(feature.in_schedulers for feature in features())):
        targets = [target for point in points for target in point.targets]
        assert len(set(targets)) == len(targets)
    names: dict[str, tuple[str, ...]] = {}
    for point in ALL:
        assert all(names.setdefault(target, point.targets) == point.targets for target in point.targets)
    on_a_gpu = {point.name for feature in features() if feature.name != "cpu" for point in feature.in_schedulers}
    assert 20 < len(on_a_gpu) <= MOST_SERVING


@pytest.mark.parametrize("point", ALL, ids=[point.name.rpartition(".srt.")[2] for point in ALL])
def test_touchpoint_resolves(point: Touchpoint) -> None:
    """Target and hook agree on what they are called with, so far as the hook names its parameters."""
    target = point.target()
    assert target is not None
    place, _, name = target.rpartition(".")
    original = getattr(pkgutil.resolve_name(place), name)
    assert callable(original)
    parameters = list(inspect.signature(point.hook).parameters.values())
    if point.kind is not HookType.BEFORE:  # the original function, or its result, comes first
        parameters = parameters[1:]
    stock = inspect.signature(inspect.unwrap(original)).parameters
    for mine in parameters:
        if mine.kind is mine.POSITIONAL_OR_KEYWORD:
            assert mine.name in stock, f"{target} has no parameter {mine.name}"


def test_a_dropped_hook_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs and forgets a hook that it cannot attach; int2 mode must not start then."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = [point.target() for point in SERVING]
    monkeypatch.setattr(failure, "_error", None)
    monkeypatch.setattr(failure, "_expected", ())
    monkeypatch.setattr(failure, "_absent", list)
    failure.expect(targets)
    monkeypatch.setattr(HookRegistry, "_patched", set(targets))
    assert failure.reason() is None
    failure.expect(targets, lambda: ["sglang.nowhere"])
    assert failure.reason() == "not attached: sglang.nowhere"
    failure.expect(targets)
    monkeypatch.setattr(HookRegistry, "_patched", set(targets[1:]))
    assert failure.reason() == f"not attached: {targets[0]}"
    monkeypatch.setattr(failure, "SGLANG_VERSIONS", ("9.9.8", "9.9.9"))
    assert "int2 mode needs sglang>=9.9.8,<=9.9.9" in str(failure.reason())


@pytest.mark.parametrize("arguments", [["--model-path", "x"], ["--kv-cache-dtype", "int2"], ["DUMP_KVCACHE"]])
@pytest.mark.parametrize("broken", ["flags", "release"])
def test_what_goes_wrong_is_told_only_to_who_asks(
    arguments: list[str], broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that does not ask for int2 never notices that the plugin cannot be installed."""
    monkeypatch.setattr(failure, "_error", None)
    monkeypatch.setattr(sys, "argv", ["launch_server.py", *arguments])
    if "DUMP_KVCACHE" in arguments:
        monkeypatch.setenv("DUMP_KVCACHE", "1")
    if broken == "flags":
        monkeypatch.setattr(flags, "install", lambda: 1 / 0)
    else:
        monkeypatch.setattr(failure, "SGLANG_VERSIONS", ("9.9.8", "9.9.9"))
        monkeypatch.setattr(touchpoints, "register_all", lambda hooks: pytest.fail("another release was hooked"))
    if "--model-path" in arguments:
        plugin.register()
        assert capsys.readouterr() == ("", "")
        return
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert caught.value.code == 78
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("division by zero" if broken == "flags" else "needs sglang>=9.9.8,<=9.9.9") in said


@dataclass
class WithInt2:
    """SGLang's server arguments, were an int2 of SGLang's own among them."""

    kv_cache_dtype: Annotated[str, Arg(help="", choices=["auto", "int2"])] = "auto"


@pytest.mark.parametrize("versions", [SGLANG_VERSIONS, ("9.9.9",)], ids=["supported", "another"])
def test_a_name_that_sglang_has_itself_is_not_taken_over(
    versions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[Touchpoint] = []
    monkeypatch.setattr("sglang.srt.server_args.ServerArgs", WithInt2)
    monkeypatch.setattr(touchpoints, "register_all", registered.extend)
    monkeypatch.setattr(failure, "SGLANG_VERSIONS", versions)
    monkeypatch.setattr(failure, "_error", None)
    monkeypatch.setattr(sys, "argv", ["launch_server.py", "--model-path", "x"])
    plugin.register()
    assert capsys.readouterr() == ("", "")
    assert registered == (touchpoints.TAKEN_NAME if versions == SGLANG_VERSIONS else [])
    for point in registered:  # Engine(kv_cache_dtype="int2") has no command line
        point.hook(WithInt2())
        with pytest.raises(Int2Error, match=r"int2 is SGLang's own here, not this plugin's; to use it set SGLANG_PLUG"):
            point.hook(WithInt2("int2"))
    monkeypatch.setattr(sys, "argv", ["launch_server.py", "--kv-cache-dtype", "int2"])
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (78, 1)
    assert "int2 is SGLang's own here" in said
    assert not hasattr(WithInt2, "kv_cache_quant_group_size")
    _, extras, position = flags._dtype_annotation(WithInt2, arg_utils)
    assert extras[position].choices == ["auto", "int2"]


@pytest.mark.parametrize(
    ("version", "served"), [("0.5.20.post1", True), ("0.5.23+cu130", True), ("0.5.23rc1", False), ("0.5.24", False)]
)
def test_post_releases_are_served_as_their_base(version: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure.importlib.metadata, "version", lambda name: version)
    assert (failure.unsupported_release() is None) == served


if hasattr(ServerArgs, "resolve_once"):
    Raw = ServerArgs
else:

    class Raw(ServerArgs):  # type: ignore[no-redef]
        """Server arguments that nobody resolves, which needs a model."""

        def __post_init__(self) -> None:
            pass


def choices() -> list[str]:
    hint = get_type_hints(ServerArgs, include_extras=True)["kv_cache_dtype"]
    return next(extra.choices for extra in hint.__metadata__ if getattr(extra, "choices", None))


def test_flags_are_installed_once() -> None:
    flags.install()
    before = (list(releases.field_defaults(ServerArgs)), choices(), ServerArgs.__init__, ServerArgs.add_cli_args)
    flags.install()
    assert (
        list(releases.field_defaults(ServerArgs)),
        choices(),
        ServerArgs.__init__,
        ServerArgs.add_cli_args,
    ) == before
    assert choices().count("int2") == 1


def test_flags_on_the_command_line() -> None:
    """The parser takes them once, the record has them, and so has a worker that gets it."""
    flags.install()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = ["--model-path", "x", "--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "32"]
    for arguments, size in ((given, 32), (given[:4], None)):
        made = Raw.from_cli_args(parser.parse_args(arguments))
        for record in (made, pickle.loads(pickle.dumps(made))):
            assert (record.kv_cache_dtype, record.kv_cache_quant_group_size) == ("int2", size)


@pytest.mark.parametrize("size", [None, 64])
def test_group_size_of_an_engine(size: int | None) -> None:
    """``Engine(...)`` makes its record of keywords."""
    from sglang.srt.entrypoints.engine import Engine

    flags.install()
    made = Engine.server_args_class
    if made is ServerArgs:
        made = Raw
    given = {} if size is None else {"kv_cache_quant_group_size": size}
    assert made(model_path="x", **given).kv_cache_quant_group_size == size


def test_refusals_read_fields_that_exist() -> None:
    """A row that reads a field under a wrong name would raise here, not at somebody's start-up."""
    refusals.check_arguments(SimpleNamespace(**releases.field_defaults(ServerArgs)))


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
