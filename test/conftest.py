"""Set up before any test module is imported; files with servers run first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

import support.session  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers first: they take longest; short ones fill the end, when a worker would wait for another."""
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
