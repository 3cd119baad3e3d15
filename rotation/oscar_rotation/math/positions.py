"""Moments of keys and queries at every position of a context, from calibration requests that are much shorter.

Rotary embedding turns pairs of channels by their position, some of them once in six tokens, some once in ten thousand.
Calibration requests of a thousand tokens show the slow pairs at a few angles only: their mean looks like a center and
their spread looks small. Eight thousand tokens on, the pair has turned elsewhere, and a center and a transform fitted
to the beginning make keys larger instead of smaller.

Attention knows distances only. A request moved along by any number of positions has the same attention, and its keys
and queries are the old ones, turned. So a moment over requests anywhere in a context is the mean of the moment that was
measured, turned by many offsets: no further activations are needed, and weights that attention gave to keys stay what
they are. Early positions count more than late ones. Where requests of every length up to the context are equally
likely, position n is part of the longer ones only, a share of 1 - n / context. With L for the largest offset, that
density is 2 (L - n) / L^2, for which the mean cosine and sine of any frequency are known in closed form: a fit for a
million positions is as exact, and takes no longer, than one for a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Positions:
    """Where in a context keys may stand.

    Attributes:
        frequencies: radians a token, float64 [pairs]. Channel p turns with channel p + pairs; those from 2 pairs on
            stand still.
        context: positions, 0 to context - 1.
        rope: facts that frequencies come from, see :data:`oscar_rotation.math.rope.Rope`; empty where nobody asks.
    """

    frequencies: torch.Tensor
    context: int
    rope: dict[str, Any] = field(default_factory=dict)

    def tables(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of some positions [n]: float64 [n, 2 pairs] each."""
        angles = offsets.double()[:, None] * self.frequencies.double()
        angles = torch.cat([angles, angles], 1)
        return angles.cos(), angles.sin()

    def offsets(self, longest: int, count: int) -> torch.Tensor:
        """How far requests of ``longest`` tokens are moved along: int64 [count], from 0 on, denser at the beginning."""
        last = max(0, self.context - longest)
        evenly = torch.arange(count, dtype=torch.float64) / count
        return (last * (1 - (1 - evenly).sqrt())).long()

    def vector(self, mean: torch.Tensor, longest: int) -> torch.Tensor:
        """The mean over all positions of vectors with this mean: float64 [..., d].

        Args:
            mean: over calibration requests, [..., d].
            longest: tokens of the longest of them.
        """
        exact = mean.double()
        cos, sin = self._means(self._channels(exact.shape[-1]), longest)
        return cos * exact + sin * self._partner(exact)

    def moment(self, moment: torch.Tensor, longest: int) -> torch.Tensor:
        """The second moment over all positions of vectors with this one, about zero: float64 [..., d, d].

        A vector x turns into cos x + sin J x, channel by channel, so its moment M into the sum of four terms, M, M J^T,
        J M and J M J^T, times means of products of cosines and sines.

        Args:
            moment: over calibration requests, about zero, [..., d, d].
            longest: tokens of the longest of them.
        """
        exact = moment.double()
        frequencies = self._channels(exact.shape[-1])
        cos_sum, sin_sum = self._means(frequencies[:, None] + frequencies, longest)
        cos_less, sin_less = self._means(frequencies[:, None] - frequencies, longest)
        right, left = self._partner(exact), self._partner(exact.mT).mT
        both = self._partner(left)
        terms = (cos_less + cos_sum) * exact + (cos_less - cos_sum) * both
        return (terms + (sin_sum - sin_less) * right + (sin_sum + sin_less) * left) / 2

    def _channels(self, d: int) -> torch.Tensor:
        """Radians a token by channel, [d]: 0 for those that stand still."""
        return torch.cat([self.frequencies, self.frequencies, self.frequencies.new_zeros(d)])[:d].double()

    def _means(self, frequencies: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cosine and sine over all offsets of requests of ``longest`` tokens, of each frequency."""
        turns = frequencies * max(0, self.context - longest)
        small = turns.abs() < 1e-3  # where the difference below would have no digits left
        safe = turns.masked_fill(small, 1.0)
        cos = torch.sinc(turns / (2 * torch.pi)).square()
        return cos, torch.where(small, turns / 3, 2 * (safe - safe.sin()) / safe.square())

    def _partner(self, x: torch.Tensor) -> torch.Tensor:
        """J x on the last axis: what a quarter turn makes of the channels that turn, 0 elsewhere."""
        pairs = len(self.frequencies)
        first, second, still = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
        return torch.cat([-second, first, torch.zeros_like(still)], -1)
