"""What PyTorch built for CUDA takes for granted where there is no GPU, and hybrid models and LoRA adapters ask of it.

It names CUDA as the machine's accelerator, whose current device hybrid models ask for when their layers are made, and
pins host memory, from which batches copy at every step, by way of the driver. This package is imported where
there is no GPU, and nowhere else: there the CPU is the device, and memory is as good as pinned.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

_get_device_module, _tensor, _zeros = torch.get_device_module, torch.tensor, torch.zeros


@cache  # as PyTorch's, whose compiler asks for what is wrapped
def get_device_module(device: Any = None) -> ModuleType:
    """As PyTorch's: the module of a device, and of the CPU where none is named."""
    module: ModuleType = _get_device_module("cpu" if device is None else device)
    return module


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """As PyTorch's, of a machine that copies nothing to a GPU: the tensor itself."""
    return self


def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """As PyTorch's, of such a machine."""
    return _tensor(*args, **kwargs)


def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """As PyTorch's, of such a machine: up to 0.5.19 SGLang has states behind drafts on CUDA, whatever the device is."""
    return _zeros(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))


for own, name in ((tensor, "aten::tensor"), (zeros, "aten::zeros")):  # in scripts, too, as modules of transformers have
    torch.jit._builtins._register_builtin(own, name)
setattr(torch, "zeros", zeros)  # noqa: B010
setattr(torch, "tensor", tensor)  # noqa: B010 - type checkers know another signature
setattr(torch, "get_device_module", get_device_module)  # noqa: B010
setattr(torch.Tensor, "pin_memory", pin_memory)  # noqa: B010
