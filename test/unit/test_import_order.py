"""Modules of the product import each other in one direction: every file can be read after those that it names."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("python/sglang_oscar", "kernels/oscar_kernels", "rotation/oscar_rotation")


def modules() -> dict[str, Path]:
    """Files by module name."""
    found = {}
    for package in PACKAGES:
        base = (ROOT / package).parent
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(source: str, known: set[str]) -> set[str]:
    """Those of the known modules that a source imports, wherever in it, and for types only too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            own = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= own & known or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known


def test_no_circles() -> None:
    files = modules()
    graph = {name: imported(path.read_text(encoding="utf-8"), set(files)) - {name} for name, path in files.items()}
    assert sum(map(len, graph.values())) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_a_circle_is_found() -> None:
    known = {"a", "b.c", "b"}
    graph = {"a": imported("def f():\n    from b import c", known), "b.c": imported("import a", known)}
    assert graph == {"a": {"b.c"}, "b.c": {"a"}}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
