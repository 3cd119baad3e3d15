"""Set up before any test module is imported; files with servers run first, small unit tests last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

import support.session  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Rooms of the plugin are registered in every process of SGLang; here where a test imports what asks them."""
    if "sglang_oscar.attach.feature" in sys.modules:
        from sglang_oscar.features import register_all

        register_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers first: they take longest; short ones fill the end, when a worker would wait for another.

    Of the others a large file takes longer than a small one, as a rule.
    """
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        alone = item.get_closest_marker("server") is None
        return alone, item.path.parent.name == "unit", -sizes[item.path] if alone else 0

    items.sort(key=place)


@pytest.fixture(autouse=True)
def weights_as_loaded() -> Iterator[None]:
    """No test leaves behind that weights were updated: keys of storage would be others from then on."""
    yield
    if (origin := sys.modules.get("sglang_oscar.formats.origin")) is not None:
        origin._update = ""  # type: ignore[attr-defined]
