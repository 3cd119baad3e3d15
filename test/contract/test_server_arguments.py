"""Server arguments that the plugin reads are there in every supported release, and nobody has overlooked a new one."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_oscar.attach import known_arguments, refusals, releases
from support import server_arguments
from support.releases import SGLANG_VERSIONS, tree
from support.syntax import SourceTree

PLUGIN = Path(releases.__file__).parents[1]

ARGUMENT_READERS = {
    "attach/refusals.py": ("a", "args"),
    "attach/gate.py": ("args",),
    "features/recording/dump_hook.py": ("args", "server_args"),
    "attach/arguments.py": ("args",),
    "features/ranks/arguments.py": ("args", "a"),
    "attention/refill_pass.py": ("server_args",),
    "attention/backend.py": ("server_args",),
    "formats/rotations.py": ("args",),
}
"""Variables that hold server arguments, by file."""
OURS = {"kv_cache_quant_group_size"}


@cache
def fields(version: str) -> dict[str, str]:
    return server_arguments.fields(SourceTree(tree(version)))


def arguments_read() -> tuple[set[str], set[str]]:
    """Server arguments that the plugin reads or sets: in all releases, and by ``argument`` where they exist."""
    always: set[str] = set()
    sometimes: set[str] = set()
    for file, names in ARGUMENT_READERS.items():
        for node in ast.walk(ast.parse((PLUGIN / file).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                always.add(node.attr)
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "argument":
                continue
            if isinstance(node.args[1], ast.Constant):
                sometimes.add(str(node.args[1].value))
    # Names that a loop goes through rather than a call.
    sometimes |= {"enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel"}
    return always - OURS, sometimes


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_server_arguments_that_are_read(version: str) -> None:
    always, _ = arguments_read()
    missing = always - set(fields(version))
    assert len(always) > 40
    assert not missing, f"arguments that are gone: {', '.join(sorted(missing))}"


def test_server_arguments_that_come_and_go() -> None:
    """What is read where it exists is there in some releases, not in all: else it is misspelt, or needs no care."""
    _, sometimes = arguments_read()
    for name in sometimes:
        having = [version for version in SGLANG_VERSIONS if name in fields(version)]
        assert 0 < len(having) < len(SGLANG_VERSIONS), (name, having)


def test_every_server_argument_has_been_read() -> None:
    """A release brings flags that nobody has judged: write the list anew, and read the difference."""
    assert server_arguments.FILE.read_text() == server_arguments.listing(), (
        "run `python test/support/server_arguments.py`, and refuse in attach/refusals.py what int2 mode cannot do"
    )


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_every_server_argument_is_in_one_group(version: str) -> None:
    """A release brings arguments: try them, refuse them, or say that nobody has (attach/known_arguments.py)."""
    rows = [name for group in known_arguments.GROUPS.values() for name in group]
    assert len(rows) == len(set(rows))
    new = {name for name in fields(version) if not name.startswith("_")} - set(rows)
    assert not new, f"arguments without a row in attach/known_arguments.py: {', '.join(sorted(new))}"


def test_groups_name_arguments_of_some_release() -> None:
    every = {name for version in SGLANG_VERSIONS for name in fields(version)}
    for title, group in known_arguments.GROUPS.items():
        assert group - OURS <= every, title


def test_what_is_refused_is_read_by_a_table_of_refusals() -> None:
    tables = [PLUGIN / "attach" / "refusals.py", PLUGIN / "attach" / "arguments.py"]
    read: set[str] = set()
    for file in [*tables, *PLUGIN.glob("features/*/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            read |= {str(getattr(node, "attr", "")), str(getattr(node, "value", ""))}
    assert read >= known_arguments.REFUSED


def test_untried_arguments_off_their_default_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"tp_size": 1, "cpu_offload_gb": 0, "brand_new": None, "_note": None, "mm_process_config": {}}
    monkeypatch.setattr(releases, "field_defaults", lambda record: defaults)
    assert known_arguments.untried(SimpleNamespace(**defaults)) == []
    given = {"tp_size": 2, "cpu_offload_gb": 4, "brand_new": 7, "_note": 1}
    assert known_arguments.untried(SimpleNamespace(**defaults | given)) == ["--cpu-offload-gb", "--brand-new"]


def test_a_record_with_its_defaults_is_at_its_defaults() -> None:
    """Also where a default is made anew for every record."""
    assert known_arguments.untried(ServerArgs(model_path="x")) == []


def defaults_of(version: str) -> dict[str, object]:
    """Defaults by name; None for one that is no literal."""
    found: dict[str, object] = {}
    for name, text in fields(version).items():
        try:
            found[name] = ast.literal_eval(text)
        except ValueError:
            found[name] = None
    return found


def refused_of(args: dict[str, object]) -> list[str]:
    return [what for refused, what in refusals.arguments() if refused(SimpleNamespace(**args))]


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_what_a_release_does_by_default_is_not_refused(
    version: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag may change its meaning, and its default with it."""
    defaults = defaults_of(version)
    monkeypatch.setattr(releases, "field_defaults", lambda record: defaults)
    assert refused_of(defaults | {"disaggregation_mode": mode}) == []


@pytest.mark.parametrize(
    ("version", "threshold", "refused"),
    [
        ("0.5.21", 0.0, False),
        ("0.5.21", 1.0, True),
        ("0.5.22", 0.0, True),
        ("0.5.23", 1.0, False),
        ("0.5.23", 0.5, True),
    ],
)
def test_receiving_into_host_memory_by_release(
    version: str, threshold: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults, name = defaults_of(version), "disaggregation_decode_host_receive_threshold"
    monkeypatch.setattr(releases, "field_defaults", lambda record: defaults)
    found = refused_of(defaults | {"disaggregation_mode": "decode", name: threshold})
    assert [what.startswith("receiving into host memory") for what in found] == [True] * refused
