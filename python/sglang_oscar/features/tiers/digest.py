"""The trailer of a page: a digest of its key and its rows. Without PyTorch, for a small process signs and checks."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16
"""At the beginning of the trailer."""
UNLIKE = "its digest is not that of its bytes"
"""What is said of a page that :func:`is_intact` refuses."""


def digest(key: str, rows: memoryview) -> bytes:
    """Digest of a page under its key: against damage and mix-ups, not against forgers. A cryptographic one, at 1 GB/s,
    would take longer than reading the page.

    Args:
        key: as the backend has it.
        rows: bytes of a page without its trailer.
    """
    return xxhash.xxh3_128_digest(rows, seed=int(key[:16], 16))


def sign(key: str, page: memoryview, item_bytes: int) -> None:
    """Write the trailer of a page, which is behind its first ``item_bytes`` bytes."""
    trailer = page[item_bytes:]
    trailer[:] = digest(key, page[:item_bytes]).ljust(len(trailer), b"\0")


def is_intact(key: str, page: memoryview, item_bytes: int) -> bool:
    """Whether the trailer is that of the page's key and rows."""
    return page[item_bytes : item_bytes + DIGEST_BYTES] == digest(key, page[:item_bytes])
