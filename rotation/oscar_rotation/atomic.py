"""Files that appear whole or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it into place.

    Its name is nobody else's: processes of two containers on one volume may have the same number.

    A reader never sees a partial file: an interrupted write leaves the old file, if any, and at worst a
    ``.tmp`` file that no reader here looks at. Missing folders are made.

    Args:
        path: final path.
        write: called with the temporary path.

    Raises:
        OSError: if the folder or file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """:func:`write_atomically` of a text, in UTF-8.

    Raises:
        OSError: if the folder or file cannot be written.
    """
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
