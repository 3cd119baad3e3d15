"""What ``oscar fit --bits`` asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import torch

from oscar_kernels.layout import AFFINE, BITS, CODEBOOK, EXACT, SYMMETRIC, WIDTHS
from oscar_rotation.files.by_head import ByHead, alike, flat
from oscar_rotation.math.bit_plan import spend

PARAMETER_BITS = {AFFINE: 32, SYMMETRIC: 16, CODEBOOK: 16}
"""Of a group's scale and, where its coding has one, zero point, in 16 bits each."""

AUTO = "auto"
"""Instead of a coding: whichever is worth most."""

FORMS = ((AFFINE, CODEBOOK), (AFFINE, SYMMETRIC))
"""What keys and values may be where a fit chooses."""

Choice = tuple[ByHead[int], ByHead[str]]
"""Width and coding of one side of a layer, or of each kv head."""

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
        return tuple(width for width, _ in self.choices(losses, head_dim, group_size, codings))  # type: ignore[misc]

    def choices(
        self, losses: torch.Tensor, head_dim: int, group_size: int, codings: Codings = (AFFINE, AFFINE)
    ) -> tuple[Choice, ...]:
        """Width and coding of every side.

        Arguments and errors are those of :meth:`plan`, but for losses [sides, 3 f] where sides have f :func:`forms`:
        form after form. With losses [sides, 3 f, kv_heads], which add up, keys of a layer may be cut between two kv
        heads: a decode step then reads it in two launches.
        """
        widths, group = self.widths(head_dim, group_size, codings), min(group_size, head_dim)
        assert self.mean is not None
        losses = losses if losses.dim() == 3 else losses[..., None]
        if not bool(losses.isfinite().all()):
            raise ValueError("losses must be finite")
        items = []
        for side, by_head in enumerate(losses.double()):
            pairs = [(width, coding_at(form, width)) for form in forms(codings)[side % 2] for width in BITS]
            items.append(_options(pairs, by_head, group, head_dim, cuts=side % 2 == 0, exact=EXACT in widths))
        # In the largest steps that all costs are multiples of.
        more = [option.bits - options[0].bits for options in items for option in options]
        parts = math.lcm(*(x.denominator for x in more))
        step = math.gcd(*(int(x * parts) for x in more)) or 1
        most = max(map(len, items))
        rows = [[option.loss for option in options] for options in items]
        costs = [[int((option.bits - options[0].bits) * parts) // step for option in options] for options in items]
        filled = torch.tensor([row + row[-1:] * (most - len(row)) for row in rows], dtype=torch.float64)
        cheapest = sum(options[0].bits for options in items)
        room = int((len(items) * self.mean - cheapest) * parts / step + 1e-6)
        spent = spend(filled, [cost + cost[-1:] * (most - len(cost)) for cost in costs], room)
        return tuple(
            options[cost.index(taken)].choice for options, cost, taken in zip(items, costs, spent, strict=True)
        )


class _Option(NamedTuple):
    bits: Fraction
    loss: float
    choice: Choice


def _options(
    pairs: Sequence[tuple[int, str]], losses: torch.Tensor, group: int, head_dim: int, cuts: bool, exact: bool
) -> list[_Option]:
    """What one side of a layer may be, by stored bits; of equal ones that which loses least, whole before cut.

    Args:
        pairs: widths and codings.
        losses: float64 [pairs, kv_heads].
        group, head_dim: channels.
        cuts: whether neighbouring heads may have one pair and the others another.
        exact: whether the side may be left exact.
    """
    heads, bits = losses.shape[1], [stored_bits(width, group, coding, head_dim) for width, coding in pairs]
    sums = torch.cat([torch.zeros(len(pairs), 1, dtype=losses.dtype), losses.cumsum(1)], 1)
    found = [_Option(bits[n], float(sums[n, -1]), pair) for n, pair in enumerate(pairs)]
    found += [_Option(Fraction(EXACT), 0.0, (EXACT, AFFINE))] if exact else []
    for cut, a, b in product(range(1, heads if cuts else 1), *[range(len(pairs))] * 2):
        if pairs[a] != pairs[b]:
            each = [pairs[a]] * cut + [pairs[b]] * (heads - cut)
            mean = (cut * bits[a] + (heads - cut) * bits[b]) / heads
            loss = float(sums[a, cut] + sums[b, -1] - sums[b, cut])
            found.append(_Option(mean, loss, (alike(x for x, _ in each), alike(x for _, x in each))))
    best: dict[Fraction, _Option] = {}
    for option in found:
        if option.bits not in best or option.loss < best[option.bits].loss:
            best[option.bits] = option
    return [best[x] for x in sorted(best)]


def mean_bits(width: ByHead[int], coding: ByHead[str], group: int, head_dim: int) -> float:
    """Bits of a channel, as of :func:`stored_bits`, on average over kv heads."""
    heads = max(len(flat([width])), len(flat([coding])))
    each = zip(*(x if isinstance(x, tuple) else (x,) * heads for x in (width, coding)), strict=True)
    return float(sum(stored_bits(x, group, of, head_dim) for x, of in each) / heads)


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
