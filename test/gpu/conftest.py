"""GPU tests need an NVIDIA GPU, some of them several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import fleet as fleets
from support import golden
from support.fleet import FLEET, Fleet


def servers(item: pytest.Item) -> list[str]:
    """Servers of the fleet that a test names with ``@pytest.mark.uses``."""
    return [name for mark in item.iter_markers("uses") for name in mark.args]


def lacking(item: pytest.Item) -> str | None:
    """Why a test cannot run here."""
    launches = [FLEET[name] for name in servers(item)]
    gpus, needed = torch.cuda.device_count(), max((launch.ranks for launch in launches), default=1)
    if needed > gpus:
        return f"needs {needed} GPUs" if gpus else "needs an NVIDIA GPU"
    return next(filter(None, map(fleets.lacking, launches)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason := lacking(item):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The servers that the selected tests name."""
    wanted = dict.fromkeys(name for item in request.session.items if not lacking(item) for name in servers(item))
    with Fleet(tmp_path_factory.mktemp("fleet"), list(wanted)) as started:
        yield started


@pytest.fixture(scope="session")
def expected() -> dict[str, list[dict[str, Any]]]:
    """What the CPU server answers."""
    return golden.load()
