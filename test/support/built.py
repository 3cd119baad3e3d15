"""Distributions of this package, built as an index gets them, with the setuptools of the environment: offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "sglang_oscar": ROOT / "python",
    "oscar_tools": ROOT / "python",
    "oscar_cpu": ROOT / "python",
    "oscar_kernels": ROOT / "kernels",
    "oscar_rotation": ROOT / "rotation",
}
"""Package -> the folder that it lies in."""


def copy_sources(to: Path) -> Path:
    """What a distribution is made from, in a new folder: building leaves files behind."""
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    for package, folder in PACKAGES.items():
        shutil.copytree(folder / package, to / folder.name / package, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def build(what: str, source: Path, out: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` and return the file."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = out.iterdir()
    return built
