"""Where a fit accumulates."""

from __future__ import annotations

import torch


def choose_device(name: str = "auto") -> torch.device:
    """The torch device of a name: "auto" is CUDA where there is a GPU, else the CPU; other names are of those two.

    Raises:
        ValueError: if the device does not exist here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {name!r}: a fit runs on a GPU by CUDA or on the CPU; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no usable CUDA GPU; use auto or cpu")
    return device
