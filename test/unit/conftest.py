"""What several unit tests stand on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of one rank."""
    place = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
