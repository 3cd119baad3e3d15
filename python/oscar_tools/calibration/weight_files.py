"""What tells two models apart: name, configuration, tokenizer, and samples of the weight files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from oscar_tools.calibration.errors import DataError
from sglang_oscar.formats.origin import WEIGHT_FILES, cached_snapshot, sample_digest

TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "vocab.*", "merges.txt")
"""Files that decide which tokens a text becomes."""


def model_files(model: str) -> dict[str, Any]:
    """What tells two models apart without reading all their weights: weights that were trained further have the names
    and sizes of the old ones, but other bytes nearly everywhere.

    Args:
        model: folder or hub id.

    Returns:
        ``name``; of a hub id also ``commit``, the one that is on this machine, None where none is; of a folder
        ``config``, a digest, ``tokenizer``: file name -> digest, and ``weights``: file name -> [bytes, digest of
        samples].

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(model)
    # The name of "." is empty.
    found: dict[str, Any] = {"name": folder.resolve().name if folder.is_dir() else model}
    if not folder.exists():
        snapshot = cached_snapshot(model)
        found["commit"] = None if snapshot is None else snapshot.name
    if folder.is_dir():
        config = folder / "config.json"
        if config.is_file():
            found["config"] = hashlib.sha256(config.read_bytes()).hexdigest()
        texts = {path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()}
        found["tokenizer"] = {path.name: file_digest(path) for path in sorted(texts)}
        found["weights"] = {
            path.name: [path.stat().st_size, sample_digest(path)]
            for path in sorted(folder.iterdir())
            if path.suffix in WEIGHT_FILES
        }
    return found


def model_folder(model: str) -> Path:
    """Where a model's files are on this machine.

    Args:
        model: folder or hub id.

    Raises:
        DataError: the hub's files are not here.
    """
    if (folder := Path(model)).is_dir():
        return folder
    if (snapshot := cached_snapshot(model)) is None:
        raise DataError(f"{model}: its files are not on this machine; name a folder")
    return snapshot


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file, read once as long as it is not written to.

    Raises:
        OSError: it cannot be read.
    """
    facts = path.stat()
    return _digest(path, facts.st_size, facts.st_mtime_ns)


@cache
def _digest(path: Path, size: int, written: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
