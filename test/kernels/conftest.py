"""Kernel tests run anywhere: on a GPU where there is one, else in Triton's interpreter (see the conftest above)."""

from __future__ import annotations

import pytest
import torch

from support import interpreter

if not torch.cuda.is_available():
    interpreter.install()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
