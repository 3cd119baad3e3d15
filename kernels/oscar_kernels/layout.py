"""The bytes of one cached token: what a row of the history pool looks like.

A row holds one token's keys (or values) for all kv heads of one layer and is complete on its own:

    [kv_heads x code bytes][kv_heads x groups x (scale, zero)]     coding affine
    [kv_heads x code bytes][kv_heads x groups x scale]             codings symmetric and codebook

so whatever moves, copies, offloads or transfers rows carries the scales with them. Affine and symmetric codes of one
head are stored in planes of channels that a kernel unpacks with a shift and a mask and never has to interleave:

* 2 bits, head_dim/4 bytes: byte ``b`` holds, at bits ``2j..2j+1`` for ``j = 0..3``, the code of channel
  ``j * head_dim/4 + b``.
* 4 bits, head_dim/2 bytes: byte ``b`` holds, at bits ``4j..4j+3`` for ``j = 0, 1``, the code of channel
  ``j * head_dim/2 + b``.
* 3 bits: the low two bits of every code as above, then head_dim/8 bytes with the high ones. That of channel
  ``j * head_dim/4 + b`` is in byte ``4 (b // 8) + b % 4`` at bit ``HIGH_BITS[j] + b // 4 % 2``. So eight neighbouring
  bytes of low bits have one 32-bit word of high bits, and, moved down by ``b // 4 % 2``, the bits of plane 0, 1 and 2
  lie where they continue the low bits in their byte.
* 16 bits: no codes. A row is the channels themselves, head after head, as bfloat16 or float16 numbers, low byte first,
  and has neither scales nor zero points: the side is *left exact*.

Scale and zero of a group are neighbours; the group of channel ``c`` is ``c // group_size``. With coding codebook, byte
``b`` of a head is the index of a point for channels ``4b`` to ``4b + 3`` (:mod:`oscar_kernels.codebook`), and the head
is one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORMAT_VERSION = 3
"""Version of the row format. It changes whenever the meaning of a stored byte does; part of every
:func:`oscar_kernels.format.fingerprint`."""
AFFINE_VERSION = 2
"""What rows are said to have where all of them are affine or exact: their bytes are those of this version."""

BITS = (2, 3, 4)
"""Bits that a code may have."""
EXACT = 16
"""Bits of a side that is left exact: numbers instead of codes."""
WIDTHS = (*BITS, EXACT)
"""Bits that a channel of a row may have, scales and zero points aside."""
AFFINE, SYMMETRIC, CODEBOOK = "affine", "symmetric", "codebook"
CODINGS = (AFFINE, SYMMETRIC, CODEBOOK)
"""What codes stand for: numbers by scale and zero point, numbers by scale alone, points of a codebook."""
HIGH_BITS = (2, 4, 6, 0)
"""Where the high bits of three-bit codes lie in their byte, by plane of the low ones."""
SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEAD_DIMS = (64, 128, 192, 256)
"""Channels that a head may have; one of values 64, 128 or 256 (:class:`oscar_kernels.format.LayerFormat`)."""
EXACT_DTYPES = (torch.bfloat16, torch.float16)
"""Of the numbers of a side that is left exact."""


def largest_group(head_dim: int, most: int) -> int:
    """Channels of the largest groups that heads divide into, of ``most`` at most.

    >>> largest_group(256, 128), largest_group(64, 128), largest_group(192, 128)
    (128, 64, 64)
    """
    return min(most, head_dim & -head_dim)


@dataclass(frozen=True)
class RowLayout:
    """Geometry of a row.

    Args:
        kv_heads: kv heads stored in a row (of this tensor-parallel rank).
        head_dim: channels per head, one of :data:`HEAD_DIMS`.
        group_size: consecutive channels that share a scale and a zero point; a power of two from 32 that divides
            head_dim. Of no meaning with 16 bits or a codebook.
        scale_dtype: dtype of scale and zero point: bfloat16, float16 or float32. Of no meaning with 16 bits.
        bits: bits of a code, 2, 3 or 4; or 16 for numbers of ``exact_dtype``.
        exact_dtype: bfloat16 or float16. Of no meaning with codes.
        coding: what codes stand for, one of :data:`CODINGS`; codebook with 2 bits only, affine with 16.

    Raises:
        ValueError: if a value is outside these bounds.
    """

    kv_heads: int
    head_dim: int
    group_size: int
    scale_dtype: torch.dtype = torch.bfloat16
    bits: int = 2
    exact_dtype: torch.dtype = torch.bfloat16
    coding: str = AFFINE

    def __post_init__(self) -> None:
        if self.kv_heads < 1:
            raise ValueError(f"kv_heads must be at least 1, got {self.kv_heads}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {self.head_dim}")
        power_of_two = self.group_size > 0 and self.group_size & (self.group_size - 1) == 0
        if not power_of_two or self.group_size < 32 or self.head_dim % self.group_size:
            raise ValueError(
                f"group_size must be a power of two from 32 that divides head_dim {self.head_dim}, "
                f"got {self.group_size}"
            )
        if self.scale_dtype not in SCALE_DTYPES.values():
            raise ValueError(f"scale_dtype must be one of {', '.join(SCALE_DTYPES)}, got {self.scale_dtype}")
        if self.bits not in WIDTHS:
            raise ValueError(f"bits must be one of {', '.join(map(str, WIDTHS))}, got {self.bits}")
        if self.exact_dtype not in EXACT_DTYPES:
            raise ValueError(f"exact_dtype must be bfloat16 or float16, got {self.exact_dtype}")
        if self.coding not in CODINGS:
            raise ValueError(f"coding must be one of {', '.join(CODINGS)}, got {self.coding!r}")
        if self.coding == CODEBOOK and self.bits != 2:
            raise ValueError(f"a codebook needs 2 bits, got {self.bits}")
        if self.exact and self.coding != AFFINE:
            raise ValueError(f"rows of 16 bits have no codes, so coding must be {AFFINE}, got {self.coding}")

    @property
    def exact(self) -> bool:
        """Whether rows hold numbers instead of codes."""
        return self.bits == EXACT

    @property
    def levels(self) -> int:
        """Values that a code can have; of codes only."""
        return 1 << self.bits

    @property
    def groups(self) -> int:
        """Groups per head; none with 16 bits, one with a codebook."""
        if self.coding == CODEBOOK:
            return 1
        return 0 if self.exact else self.head_dim // self.group_size

    @property
    def group_params(self) -> int:
        """Numbers that a group has besides its codes: scale and zero point, or the scale alone."""
        return 2 if self.coding == AFFINE else 1

    @property
    def code_bytes(self) -> int:
        """Bytes of codes, or of numbers, per head."""
        return self.head_dim * self.bits // 8

    @property
    def param_bytes(self) -> int:
        """Scale and zero-point bytes per head."""
        return self.groups * self.group_params * self.scale_dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """All bytes of one head in a row."""
        return self.code_bytes + self.param_bytes

    @property
    def params_offset(self) -> int:
        """Byte at which the scales and zero points of a row begin."""
        return self.kv_heads * self.code_bytes

    @property
    def row_bytes(self) -> int:
        """All bytes of a row: one token's keys, or values, in one layer."""
        return self.kv_heads * self.head_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per key (or value) channel, scale and zero point included."""
        return 8 * self.head_bytes / self.head_dim
