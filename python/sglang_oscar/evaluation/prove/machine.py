"""What a run depends on besides its settings and its model: machine and versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

import oscar_kernels
import sglang_oscar
from sglang_oscar.cpu.server import has_gpu

SOURCES = (".py", ".cu", ".cuh")
MEASURING = ("calibration", "evaluation")
"""Folders of the plugin that no server runs."""


def machine() -> dict[str, str]:
    """Device and versions."""
    import torch

    names = {"sglang": "sglang", "plugin": "sglang-oscar", "transformers": "transformers"}
    versions = {label: _version(package) for label, package in names.items()}
    versions["plugin"] += f" ({source_digest()})"
    cuda = {"cuda": str(torch.version.cuda)} if has_gpu() else {}
    device = torch.cuda.get_device_name() if has_gpu() else f"CPU ({platform.machine()})"
    return {"device": device} | versions | {"torch": torch.__version__} | cuda | {"python": platform.python_version()}


def source_digest() -> str:
    """Eight digits for the code that serves: answers of a changed plugin are not those of the old one."""
    digest = hashlib.sha256()
    for package in (sglang_oscar, oscar_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.suffix in SOURCES and not set(MEASURING) & set(path.relative_to(root).parts):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
