"""Sizes of heads that a fit has matrices for."""

from __future__ import annotations

from pathlib import Path

from oscar_rotation.errors import DumpError
from oscar_rotation.math.hadamard import NO_HADAMARD, has_hadamard


def check_heads(root: Path, *head_dims: int) -> None:
    """Refuse a dump of heads for which there is no Hadamard matrix.

    Args:
        root: of the dump.
        head_dims: channels of its heads.

    Raises:
        DumpError: naming the size.
    """
    for head_dim in head_dims:
        if not has_hadamard(head_dim):
            raise DumpError(f"{root}: head_dim is {head_dim}; {NO_HADAMARD}")
