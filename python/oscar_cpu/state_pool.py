"""SGLang's host pool of the states of linear layers: without pinned memory, and with copies in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

IN_TORCH = "kernel_ascend"
"""SGLang's name of copies for another machine, which are done in torch where that machine's library is missing."""


def around_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Host memory is pinned for GPUs alone."""
    original(self, *args, **kwargs | {"pin_memory": False})


def around_load(
    original: Callable[..., None],
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str = IN_TORCH,
    **further: Any,
) -> None:
    """Copy one layer of some slots from the host."""
    original(self, device_pool, host_indices, device_indices, layer_id, IN_TORCH, **further)


def around_back_up(
    original: Callable[..., None],
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str = IN_TORCH,
) -> None:
    """Copy some slots to the host."""
    original(self, device_pool, host_indices, device_indices, IN_TORCH)
