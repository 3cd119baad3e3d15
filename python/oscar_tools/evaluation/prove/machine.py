"""What a run depends on besides its settings and its model: machine and versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import oscar_cpu
import oscar_kernels
import oscar_rotation
import sglang_oscar
from oscar_cpu.server import has_gpu

SOURCES = (".py", ".cu", ".cuh")
SERVED = {sglang_oscar: ("recording",), oscar_cpu: (), oscar_kernels: (), oscar_rotation: ("dump", "fit", "report")}
"""Package -> folders of it that no server runs."""
FITTING = {oscar_rotation: (), oscar_kernels: ("cuda", "triton")}
"""The same of what fits rotations."""


def machine() -> dict[str, str]:
    """Device and versions."""
    import torch

    versions = {"sglang": _version("sglang")}
    # Not what the metadata of an editable install say: those are of the day that it was installed.
    versions["plugin"] = f"{sglang_oscar.__version__} ({source_digest(SERVED)})"
    versions["transformers"] = _version("transformers")
    cuda = {"cuda": str(torch.version.cuda)} if has_gpu() else {}
    device = torch.cuda.get_device_name() if has_gpu() else f"CPU ({platform.machine()})"
    return {"device": device} | versions | {"torch": torch.__version__} | cuda | {"python": platform.python_version()}


def source_digest(packages: Mapping[ModuleType, Sequence[str]]) -> str:
    """Eight digits for code: what a changed package gives is not what the old one gave.

    Args:
        packages: package -> folders of it that do not count.
    """
    digest = hashlib.sha256()
    for package, besides in packages.items():
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.suffix in SOURCES and not set(besides) & set(path.relative_to(root).parts):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
