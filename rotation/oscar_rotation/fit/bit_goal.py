"""What ``oscar fit --bits`` asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oscar_kernels.layout import BITS

PARAMETER_BITS = 32
"""Of a group's scale and zero point, in 16 bits each."""


@dataclass(frozen=True)
class BitGoal:
    """What ``--bits`` asks for: a width for each side, or a mean over all.

    Attributes:
        key, value: bits of a code; None where a mean is asked for.
        mean: stored bits per element, scales and zero points included; None where widths are asked for.
    """

    key: int | None = None
    value: int | None = None
    mean: float | None = None

    @classmethod
    def parse(cls, text: str) -> BitGoal:
        """From what a user writes.

        Raises:
            ValueError: neither.

        >>> BitGoal.parse("k3v2"), BitGoal.parse("2.5").mean
        (BitGoal(key=3, value=2, mean=None), 2.5)
        """
        if match := re.fullmatch(r"k([0-9])v([0-9])", text.lower()):
            key, value = int(match[1]), int(match[2])
            if key in BITS and value in BITS:
                return cls(key, value)
        elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            return cls(mean=float(text))
        widths = " or ".join(map(str, BITS))
        raise ValueError(f"must be a mean such as 2.5, or widths of {widths} such as k3v2, got {text!r}")

    def budget(self, sides: int, head_dim: int, group_size: int) -> int:
        """Bits of a code, summed over all sides of all layers, that the mean allows.

        Raises:
            ValueError: the mean is out of reach.
        """
        assert self.mean is not None
        overhead = PARAMETER_BITS / min(group_size, head_dim)
        low, high = BITS[0] + overhead, BITS[-1] + overhead
        if not low <= self.mean <= high:
            raise ValueError(
                f"must be from {low:g} to {high:g} with groups of {min(group_size, head_dim)}, got {self.mean:g}"
            )
        return int(sides * (self.mean - overhead) + 1e-6)
