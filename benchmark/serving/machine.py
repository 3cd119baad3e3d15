"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_oscar.cpu.server import has_gpu


def describe() -> dict[str, Any]:
    """GPU, versions and command line, for the head of a result file."""
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton")}
    command = ["python", f"benchmark/serving/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu() else None,
        "python": platform.python_version(),
        **versions,
        "command": shlex.join(command),
    }
