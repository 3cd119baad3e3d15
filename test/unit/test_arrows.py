"""No room of the plugin imports one above it: the core imports no feature, and nothing imports the tools."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_oscar.features import CORE, FEATURES

PYTHON = Path(__file__).parents[2] / "python"
FLOORS = [
    "names", "errors", "metrics", "settings", "worker", "attach", "formats", "rotation_source", "memory", "requests",
    "attention",
]  # fmt: skip
"""From the bottom; features are above them all, and beside each other."""
ROOT = ("plugin", "features", "sglang_oscar")
"""What knows every room, and what none is needed for."""


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever it does; not those that only a type checker sees."""
    tree = ast.parse(path.read_text())
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room of a dotted name below ``sglang_oscar``."""
    parts = name.removesuffix(".__init__").split(".")[1:] or ["sglang_oscar"]
    return ".".join(parts[:2]) if parts[0] == "features" else parts[0]


def arrows() -> Iterator[tuple[str, str, str]]:
    """File, its room, and a room that it imports from."""
    for path in sorted((PYTHON / "sglang_oscar").rglob("*.py")):
        own = room(".".join(path.relative_to(PYTHON).with_suffix("").parts))
        for name in imported(path):
            if name.startswith("sglang_oscar."):
                yield str(path.relative_to(PYTHON)), own, room(name)


def is_up(own: str, other: str) -> bool:
    """Whether an arrow runs up, or from one feature to another."""
    if own == other or own in ROOT or other not in {*FLOORS, *(f"features.{name}" for name in FEATURES)}:
        return False
    if other.startswith("features."):
        return True
    return not own.startswith("features.") and FLOORS.index(own) < FLOORS.index(other)


def test_no_arrow_runs_up() -> None:
    found = list(arrows())
    assert len(found) > 300
    assert [f"{file}: {other}" for file, own, other in found if is_up(own, other)] == []
    assert {own for _, own, _ in found} <= {*FLOORS, *ROOT, *(f"features.{name}" for name in FEATURES)}


@pytest.mark.parametrize("package", ["sglang_oscar", "oscar_cpu", "oscar_tools"])
def test_packages_import_those_below(package: str) -> None:
    """A server imports no tools, a GPU server nothing for CPUs; tools import no SGLang before a command needs it."""
    above = {"sglang_oscar": ("oscar_tools", "oscar_cpu"), "oscar_cpu": ("oscar_tools",), "oscar_tools": ()}[package]
    for path in sorted((PYTHON / package).rglob("*.py")):
        for name in imported(path):
            assert not name.startswith(tuple(f"{other}." for other in above)), path
    if package == "oscar_tools":
        for path in sorted((PYTHON / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not [name for name in names if name.split(".")[0] == "sglang"], path


def test_every_room_registers() -> None:
    for name in FEATURES:
        assert (PYTHON / "sglang_oscar" / "features" / name / "feature.py").is_file()
    for name in CORE:
        assert (PYTHON / "sglang_oscar" / name / "feature.py").is_file()
    folders = {
        path.name for path in (PYTHON / "sglang_oscar" / "features").iterdir() if (path / "__init__.py").is_file()
    }
    assert folders == set(FEATURES)
