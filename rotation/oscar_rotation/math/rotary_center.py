"""What keys have in common before RoPE, taken off at every position: the center m + R(n) mu.

Keys are turned by their position, so a mean after RoPE keeps only what does not turn. The mean mu before RoPE, turned
to position n, is the part of a key that can be known from its position alone; in pairs that turn slowly over a request
it and the constant m say nearly the same, and m takes what is left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUNDS = 6
"""Alternations between the two parts; they are orthogonal but for slow pairs, so a few do."""


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in halves, as transformers applies it; the negative sine undoes it.

    Args:
        x: [..., n, d] or anything that broadcasts with it.
        cos, sin: [n, r]; channels from r on do not turn.
    """
    r = cos.shape[-1]
    moving, still = x[..., :r], x[..., r:]
    first, second = moving.chunk(2, -1)
    out = moving * cos + torch.cat([-second, first], -1) * sin
    return out if r == x.shape[-1] else torch.cat([out, still.expand(*out.shape[:-1], -1)], -1)


@dataclass(frozen=True)
class RotaryCenter:
    """The center of the keys of one layer.

    Attributes:
        constant: m, float32 [heads, d], in the model's basis.
        turning: mu, float32 [heads, d]; zeros where a head has none.
    """

    constant: torch.Tensor
    turning: torch.Tensor

    def at(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The center of every position: float32 [heads, n, d]; tables [n, r] of the positions."""
        if not bool(self.turning.any()):
            return self.constant[:, None].expand(-1, len(cos), -1)
        return self.constant[:, None] + turned(self.turning[:, None], cos, sin)


def fit_center(
    keys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    turning: bool,
) -> RotaryCenter:
    """The center with the least weighted squared distance to the keys.

    Args:
        keys: of requests, float32 [heads, n, d] each, after RoPE.
        weights: float32 [heads, n] each.
        tables: cosines and sines of the positions of each request, [n, r].
        turning: whether mu is fitted; m alone otherwise.
    """
    total = torch.stack([w.sum(1) for w in weights]).sum(0)[:, None].clamp_min(1e-30)
    m = torch.zeros_like(keys[0][:, 0])
    mu = torch.zeros_like(m)
    for _ in range(ROUNDS if turning else 1):
        center = RotaryCenter(m, mu)
        if turning:
            mu = mu + _mean(
                [
                    turned(k - center.at(cos, sin), cos, -sin)
                    for k, (cos, sin) in zip(keys, tables, strict=True)
                ], weights, total,
            )  # fmt: skip
            center = RotaryCenter(m, mu)
        m = m + _mean([k - center.at(*t) for k, t in zip(keys, tables, strict=True)], weights, total)
    return RotaryCenter(m, mu)


def _mean(xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x * w[..., None]).sum(1) for x, w in zip(xs, weights, strict=True)]).sum(0) / total
