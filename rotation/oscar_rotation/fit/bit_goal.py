"""What ``oscar fit --bits`` asks for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from oscar_kernels.layout import BITS, EXACT, WIDTHS
from oscar_rotation.math.bit_plan import spend

PARAMETER_BITS = 32
"""Of a group's scale and zero point, in 16 bits each."""


@dataclass(frozen=True)
class BitGoal:
    """What ``--bits`` asks for: a width for each side, or a mean over all.

    Attributes:
        key, value: bits of a code, or 16 to leave a side exact; None where a mean is asked for.
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
        if match := re.fullmatch(r"k([0-9]{1,2})v([0-9]{1,2})", text.lower()):
            key, value = int(match[1]), int(match[2])
            if key in WIDTHS and value in WIDTHS:
                return cls(key, value)
        elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            return cls(mean=float(text))
        widths = " or ".join(map(str, WIDTHS))
        raise ValueError(f"must be a mean such as 2.5, or widths of {widths} such as k3v2, got {text!r}")

    def widths(self, head_dim: int, group_size: int) -> tuple[int, ...]:
        """What a mean may be spent on.

        Sides are left exact only for means that codes cannot spend: twelve bits more for one side are one bit more for
        twelve, which is worth more nearly everywhere, and a model of which a side is left exact decodes more slowly.

        Args:
            head_dim: channels of a head.
            group_size: channels that share a scale; head_dim where larger.

        Raises:
            ValueError: the mean is out of reach.
        """
        assert self.mean is not None
        group = min(group_size, head_dim)
        low, high = (stored_bits(width, group) for width in (BITS[0], BITS[-1]))
        if not low <= self.mean <= EXACT:
            raise ValueError(f"must be from {float(low):g} to {EXACT} with groups of {group}, got {self.mean:g}")
        return BITS if self.mean <= high else WIDTHS

    def plan(self, losses: torch.Tensor, head_dim: int, group_size: int) -> tuple[int, ...]:
        """The width of every side with the least sum of losses that a mean allows.

        Args:
            losses: [sides, 3], of each side at each width of :data:`oscar_kernels.layout.BITS`; a side that is left
                exact loses nothing.
            head_dim, group_size: as for :meth:`widths`.

        Raises:
            ValueError: the mean is out of reach, or a loss is not finite.
        """
        widths, group = self.widths(head_dim, group_size), min(group_size, head_dim)
        assert self.mean is not None
        if EXACT in widths:
            losses = torch.cat([losses, torch.zeros(len(losses), 1, dtype=losses.dtype)], 1)
        least = stored_bits(widths[0], group)
        more = [stored_bits(width, group) - least for width in widths]
        # In the largest steps that all widths are multiples of: without sides that are left exact, in bits.
        parts = math.lcm(*(x.denominator for x in more))
        step = math.gcd(*(int(x * parts) for x in more))
        costs = [int(x * parts) // step for x in more]
        room = int(len(losses) * (self.mean - least) * parts / step + 1e-6)
        return tuple(widths[costs.index(cost)] for cost in spend(losses, costs, room))


def stored_bits(width: int, group: int) -> Fraction:
    """Bits of a channel in groups of ``group``, scale and zero point included; a side that is left exact has neither.

    >>> float(stored_bits(3, 128)), float(stored_bits(16, 128))
    (3.25, 16.0)
    """
    return Fraction(width) + (0 if width == EXACT else Fraction(PARAMETER_BITS, group))
