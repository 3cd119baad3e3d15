"""What a model's attention weights hold, by samples: tells weights of one shape apart, wherever their files lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from sglang_oscar.formats.origin import cached_snapshot
from sglang_oscar.formats.safetensors_header import read_header, tensors_of

PART = "attn"
"""In the names of the tensors that are sampled: those that queries, keys and values come from."""
SAMPLE_BYTES = 4096
"""From the middle of a tensor; training changes bytes nearly everywhere."""

_known: dict[Path, str] = {}


def attention_digest(model_path: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Which attention weights a path means.

    Args:
        model_path: a folder or the id of a hub.
        revision: of the hub.
        download_dir: where SGLang puts downloads, None for the default.

    Returns:
        ``FORM:CONTENT``, digests of the names, dtypes and shapes of the tensors, and of samples of them; sharding and
        other tensors do not matter. Empty where no safetensors files are here. Kept: of a process it is one.
    """
    place = Path(model_path)
    folder = place if place.exists() else cached_snapshot(model_path, revision or "main", download_dir)
    if folder is None or not folder.is_dir():
        return ""
    folder = folder.resolve()
    if folder not in _known:
        found = sorted(sample for path in folder.glob("*.safetensors") for sample in _samples(path))
        if not found:
            return ""
        form = hashlib.sha256(json.dumps([facts for facts, _ in found]).encode())
        content = hashlib.sha256(b"".join(digest for _, digest in found))
        _known[folder] = f"{form.hexdigest()[:16]}:{content.hexdigest()[:32]}"
    return _known[folder]


def _samples(path: Path) -> list[tuple[list[Any], bytes]]:
    """Name, dtype and shape of a file's attention tensors, and a digest of a sample of each; none of a broken file."""
    try:
        with path.open("rb") as file:
            header = read_header(file.fileno())
            return [
                ([name, of["dtype"], of["shape"]], _sample(file, *(len(header) + x for x in of["data_offsets"])))
                for name, of in tensors_of(header).items()
                if PART in name
            ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # Whoever loads it says what is wrong with it.


def _sample(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(max(begin, (begin + end - SAMPLE_BYTES) // 2))
    return hashlib.sha256(file.read(min(SAMPLE_BYTES, end - begin))).digest()
