"""What a result was measured on, and how much of its memory is in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from oscar_cpu.server import has_gpu
from oscar_rotation.defaults import BITS


def describe() -> dict[str, Any]:
    """GPU, versions, default bits and command line, for the head of a result file."""
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "triton")}
    command = ["python", f"benchmark/serving/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu() else None,
        "python": platform.python_version(),
        **versions,
        "default_bits": BITS,
        "command": shlex.join(command),
    }


def used_bytes() -> int:
    """Bytes in use on the first GPU that this process sees, by all processes together.

    Raises:
        FileNotFoundError: there is no ``nvidia-smi``.
        subprocess.CalledProcessError: it failed.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20
