"""GPU tests need an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.fleet import Fleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The servers that the selected tests name with ``@pytest.mark.uses``."""
    wanted: dict[str, None] = {}
    for item in request.session.items:
        for mark in item.iter_markers("uses"):
            wanted.update(dict.fromkeys(mark.args))
    started = Fleet(tmp_path_factory.mktemp("fleet"), list(wanted))
    yield started
    started.close()
