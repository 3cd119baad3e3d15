"""The header of a safetensors file: where its tensors are, read without loading one."""

from __future__ import annotations

import json
import os
from typing import Any

MOST_BYTES = 100 << 20
"""Of a header; the format has the same bound."""


def read_header(descriptor: int) -> bytes:
    """A header with the eight bytes in front of it that say its length; empty where a file has none.

    Args:
        descriptor: of an open file; its position does not matter.

    Raises:
        OSError: it cannot be read.
    """
    length = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    return os.pread(descriptor, length, 0) if 8 < length <= min(os.fstat(descriptor).st_size, MOST_BYTES) else b""


def tensors_of(header: bytes) -> dict[str, dict[str, Any]]:
    """Name -> ``dtype``, ``shape`` and ``data_offsets``: first and last byte, from the end of the header.

    Args:
        header: of :func:`read_header`.

    Raises:
        ValueError: it is broken, or empty.
    """
    tensors = json.loads(header[8:])
    if not isinstance(tensors, dict):
        raise ValueError("the header is no object")
    return {name: of for name, of in tensors.items() if name != "__metadata__"}
