"""What ``oscar fit --bits`` asks for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from oscar_kernels.layout import AFFINE, BITS, CODEBOOK, EXACT, SYMMETRIC, WIDTHS
from oscar_rotation.math.bit_plan import spend

PARAMETER_BITS = {AFFINE: 32, SYMMETRIC: 16, CODEBOOK: 16}
"""Of a group's scale and, where its coding has one, zero point, in 16 bits each."""

AUTO = "auto"
"""Instead of a coding: whichever is worth most, by layer."""

FORMS = ((AFFINE, CODEBOOK), (AFFINE, SYMMETRIC))
"""What keys and values may be where a fit chooses. All heads of a layer have the same width and coding: rows of a side
have one layout."""

Codings = tuple[str, str]
"""Of keys and of values."""


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

    def widths(self, head_dim: int, group_size: int, codings: Codings = (AFFINE, AFFINE)) -> tuple[int, ...]:
        """What a mean may be spent on.

        Sides are left exact only for means that codes cannot spend: twelve bits more for one side are one bit more for
        twelve, which is worth more nearly everywhere, and a model of which a side is left exact decodes more slowly.

        Args:
            head_dim: channels of a head.
            group_size: channels that share a scale; head_dim where larger.
            codings: that are asked for.

        Raises:
            ValueError: the mean is out of reach.
        """
        assert self.mean is not None
        group = min(group_size, head_dim)
        bits = [[stored_bits(width, group, of, head_dim) for of in side] for width in (BITS[0], BITS[-1])
                for side in forms(codings)]  # fmt: skip
        low, high = sum(map(min, bits[:2])) / 2, sum(map(max, bits[2:])) / 2
        if not low <= self.mean <= EXACT:
            raise ValueError(f"must be from {float(low):g} to {EXACT} with groups of {group}, got {self.mean:g}")
        return BITS if self.mean <= high else WIDTHS

    def plan(
        self, losses: torch.Tensor, head_dim: int, group_size: int, codings: Codings = (AFFINE, AFFINE)
    ) -> tuple[int, ...]:
        """The width of every side with the least sum of losses that a mean allows.

        Args:
            losses: [sides, 3], of each side at each width of :data:`oscar_kernels.layout.BITS`; keys and values by
                turns. A side that is left exact loses nothing.
            head_dim, group_size, codings: as for :meth:`widths`.

        Raises:
            ValueError: the mean is out of reach, or a loss is not finite.
        """
        return tuple(width for width, _ in self.choices(losses, head_dim, group_size, codings))

    def choices(
        self, losses: torch.Tensor, head_dim: int, group_size: int, codings: Codings = (AFFINE, AFFINE)
    ) -> tuple[tuple[int, str], ...]:
        """Width and coding of every side; arguments and errors as of :meth:`plan`, but losses [sides, 3 f] where sides
        have f :func:`forms`: form after form."""
        widths, group = self.widths(head_dim, group_size, codings), min(group_size, head_dim)
        assert self.mean is not None
        sides = [[(width, coding_at(form, width)) for form in side for width in BITS] for side in forms(codings)]
        if EXACT in widths:
            losses = torch.cat([losses, torch.zeros(len(losses), 1, dtype=losses.dtype)], 1)
            sides = [[*side, (EXACT, AFFINE)] for side in sides]
        order = [sorted(range(len(x)), key=lambda n: stored_bits(x[n][0], group, x[n][1], head_dim)) for x in sides]
        sides = [[side[n] for n in by] for side, by in zip(sides, order, strict=True)]
        rows = torch.stack([losses[n, order[n % 2]] for n in range(len(losses))])
        bits = [[stored_bits(width, group, coding, head_dim) for width, coding in side] for side in sides]
        more = [[x - side[0] for x in side] for side in bits]
        # In the largest steps that all of them are multiples of: without sides that are left exact, in bits.
        parts = math.lcm(*(x.denominator for side in more for x in side))
        step = math.gcd(*(int(x * parts) for side in more for x in side))
        costs = [[int(x * parts) // step for x in side] for side in more]
        cheapest = sum(bits[n % 2][0] for n in range(len(rows)))
        room = int((len(rows) * self.mean - cheapest) * parts / step + 1e-6)
        found = []
        for n, cost in enumerate(spend(rows, [costs[n % 2] for n in range(len(rows))], room)):
            equal = [choice for choice, x in enumerate(costs[n % 2]) if x == cost]
            found.append(sides[n % 2][min(equal, key=lambda choice: float(rows[n, choice]))])
        return tuple(found)


def forms(codings: Codings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Codings of keys and of values to choose from, as many of both.

    >>> forms(("auto", "affine")), forms(("codebook", "symmetric"))
    ((('affine', 'codebook'), ('affine', 'affine')), (('codebook',), ('symmetric',)))
    """
    count = 2 if AUTO in codings else 1
    key, value = (of if coding == AUTO else (coding,) * count for coding, of in zip(codings, FORMS, strict=True))
    return key, value


def coding_at(coding: str, width: int) -> str:
    """The coding that a side has at a width where ``coding`` is asked for: a codebook stands for two bits, and 16 bits
    are no codes.

    >>> coding_at("codebook", 2), coding_at("codebook", 3), coding_at("symmetric", 16)
    ('codebook', 'affine', 'affine')
    """
    return AFFINE if width == EXACT or (coding == CODEBOOK and width != BITS[0]) else coding


def stored_bits(width: int, group: int, coding: str = AFFINE, head_dim: int = 0) -> Fraction:
    """Bits of a channel in groups of ``group``, scale and zero point included; a side that is left exact has neither,
    a head of ``head_dim`` with a codebook one scale.

    >>> float(stored_bits(3, 128)), float(stored_bits(16, 128)), float(stored_bits(2, 32, "codebook", 128))
    (3.25, 16.0, 2.125)
    """
    coding = coding_at(coding, width)
    parameters = Fraction(PARAMETER_BITS[coding], head_dim if coding == CODEBOOK else group)
    return Fraction(width) + (0 if width == EXACT else parameters)
