"""The supported releases of SGLang, as trees of sources: which of them a test run serves, and how."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from releases import older_transformers, pins, tree

from sglang_oscar import SGLANG_VERSIONS as SUPPORTED
from sglang_oscar.attach.failure import ALLOW_NEWER

__all__ = [
    "PYTHON_CORE",
    "SGLANG_VERSIONS",
    "SUPPORTED",
    "environment",
    "has_compiled_tree",
    "installed",
    "needs_newer_python",
    "paths",
    "pins",
    "served",
    "smoked",
    "tree",
]

NEXT = os.environ.get("OSCAR_TEST_NEXT", "")
"""A release that is not supported: tests of releases are then for it alone (scripts/next_release.sh)."""
SGLANG_VERSIONS = (NEXT,) if NEXT else SUPPORTED

PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
"""A tree lacks compiled extensions, and one made for another PyTorch would not work: the prefix tree has a Python
implementation, which older releases take without being told."""


def chosen(default: str) -> list[str]:
    """Releases that OSCAR_TEST_RELEASES names, or ``default``: ``all``, or versions with commas between.

    Raises:
        pytest.UsageError: one is not supported.
    """
    names = NEXT or os.environ.get("OSCAR_TEST_RELEASES", default)
    versions = list(SGLANG_VERSIONS) if names == "all" else names.split(",")
    if unknown := sorted(set(versions) - set(SGLANG_VERSIONS)):
        raise pytest.UsageError(f"OSCAR_TEST_RELEASES={names}: {', '.join(unknown)} is not a supported release")
    return versions


def smoked() -> list[str]:
    """Releases of which one int2 server is started: all, unless OSCAR_TEST_RELEASES says which."""
    return chosen("all")


def served() -> list[str]:
    """Releases that are tested further: the oldest and the newest, unless OSCAR_TEST_RELEASES says which."""
    return chosen(f"{SGLANG_VERSIONS[0]},{SGLANG_VERSIONS[-1]}")


def requirement(version: str, begins: str) -> str:
    """What a release's metadata say behind ``begins``."""
    metadata = next(tree(version).glob("sglang-*.dist-info/METADATA")).read_text()
    return next(line.removeprefix(begins) for line in metadata.splitlines() if line.startswith(begins))


def numbers(version: str) -> tuple[int, ...]:
    """A version of numbers only, to be compared."""
    return tuple(int(part) for part in version.split("."))


def needs_newer_python(version: str) -> bool:
    """Whether a release wants a later Python than this one."""
    return sys.version_info[:2] < numbers(requirement(version, "Requires-Python: >="))


def paths(version: str) -> list[str]:
    """Folders for PYTHONPATH that put a release in place of the installed one.

    Its own transformers is among them where the installed one is newer: both would define some models.
    """
    wanted = requirement(version, "Requires-Dist: transformers==")
    if numbers(wanted) >= numbers(importlib.metadata.version("transformers")):
        return [str(tree(version))]
    kept, place = older_transformers()
    assert kept == wanted, f"SGLang {version} wants transformers {wanted}, scripts/releases.txt has {kept}"
    return [str(tree(version)), str(place)]


def installed() -> str:
    """The release of the environment."""
    return importlib.metadata.version("sglang")


def has_compiled_tree() -> bool:
    """Whether the release of the environment came with a compiled prefix tree."""
    files = importlib.metadata.files("sglang") or []
    return any(file.match("*/rust_tree_core/*.so") and Path(str(file.locate())).exists() for file in files)


def environment(version: str, **variables: str) -> dict[str, str]:
    """Variables that put a release in place of the installed one, which is left as it is, and ``variables`` besides.

    What it compiles for itself is kept apart.
    """
    if version == NEXT:
        variables = {ALLOW_NEWER: "1"} | variables
    if version == installed():
        return variables
    own = PYTHON_CORE | {"PYTHONPATH": os.pathsep.join(paths(version))}
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        own["TORCH_EXTENSIONS_DIR"] = os.path.join(folder, version)
    return own | variables
