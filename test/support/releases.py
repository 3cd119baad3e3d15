"""The supported releases of SGLang, as trees of sources: which of them a test run serves, and how."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from releases import pins, tree

from sglang_oscar import SGLANG_VERSIONS

__all__ = ["SGLANG_VERSIONS", "environment", "needs_newer_python", "pins", "served", "tree"]

PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
"""A tree lacks compiled extensions, and one made for another PyTorch would not work: the prefix tree has a Python
implementation, which older releases take without being told."""


def served() -> list[str]:
    """Releases that servers are started of: the oldest and the newest, or what OSCAR_TEST_RELEASES says.

    ``all``, or versions with commas between.
    """
    chosen = os.environ.get("OSCAR_TEST_RELEASES", f"{SGLANG_VERSIONS[0]},{SGLANG_VERSIONS[-1]}")
    versions = list(SGLANG_VERSIONS) if chosen == "all" else chosen.split(",")
    if unknown := sorted(set(versions) - set(SGLANG_VERSIONS)):
        raise pytest.UsageError(f"OSCAR_TEST_RELEASES={chosen}: {', '.join(unknown)} is not a supported release")
    return versions


def needs_newer_python(version: str) -> bool:
    """Whether a release wants a later Python than this one."""
    metadata = next(tree(version).glob("sglang-*.dist-info/METADATA")).read_text()
    wanted = next(line for line in metadata.splitlines() if line.startswith("Requires-Python: >="))
    return sys.version_info[:2] < tuple(int(part) for part in wanted.rpartition("=")[2].split("."))


def environment(version: str, **variables: str) -> dict[str, str]:
    """Variables that put a release in place of the installed one, and ``variables`` besides."""
    return PYTHON_CORE | {"PYTHONPATH": str(tree(version))} | variables
