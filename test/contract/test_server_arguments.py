"""Server arguments that the plugin reads are there in every supported release, and nobody has overlooked a new one."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from sglang_oscar.attach import releases
from support import server_arguments
from support.releases import SGLANG_VERSIONS, tree
from support.syntax import SourceTree

PLUGIN = Path(releases.__file__).parents[1]

ARGUMENT_READERS = {
    "attach/refusals.py": ("a", "args"),
    "attach/gate.py": ("args",),
    "calibration/dump_hook.py": ("args", "server_args"),
    "requests/metrics.py": ("server_args",),
    "attention/refill_pass.py": ("server_args",),
    "attention/backend.py": ("server_args",),
    "weights/absorption.py": ("server_args",),
    "weights/rotations.py": ("args",),
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
    assert not missing, f"ServerArgs of sglang {version} has no {sorted(missing)}"


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
