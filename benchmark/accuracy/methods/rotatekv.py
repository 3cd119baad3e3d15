"""RotateKV: Hadamard over groups of heads before RoPE, channels sorted into groups, sink tokens exact."""

from __future__ import annotations

import math

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method
from accuracy.quantizers import uniform, uniform_bits
from oscar_rotation.math.hadamard import sylvester_hadamard

HEADS_TOGETHER, GROUP, RANGE, SINK_TOKENS = 4, 128, 0.8, 20
"""Heads that are rotated together, channels of a scale, share of min..max that the levels span, exact tokens: the
settings of the authors' program at 2 bits (github.com/ZunhaiSu/RotateKV)."""


class RotateKV(Method):
    """Keys are taken back to before RoPE, groups of heads rotated by one Hadamard matrix, and all channels of a layer
    sorted by what they sum to over calibration, so that channels that share a scale are alike. Values: Hadamard.

    Assumed, where paper and program leave it open or a laboratory of one attention layer cannot follow: the exact
    tokens are the first ones, not those of the largest hidden activations; groups of heads have as many as fit; no
    recent window; the range is that of each token in each group, shortened at both ends alike; where groups of 128
    do not divide the channels of a layer, the largest power of two that does takes their place.
    """

    name = "RotateKV g128"
    source = "Su et al. 2025 (arXiv 2501.16383); see the class for what is assumed"
    sink, recent = SINK_TOKENS, 0
    group = GROUP

    def fit(self, calibration: Calibration) -> None:
        """The order of channels in every layer."""
        self.rotary = calibration.rotary
        heads = calibration.kv_heads
        self.group = math.gcd(GROUP, heads * calibration.head_dim)
        together = next(n for n in (HEADS_TOGETHER, 2, 1) if heads % n == 0)
        self.hadamard = {
            size: sylvester_hadamard(size).float().to(calibration.device)
            for size in (calibration.head_dim, together * calibration.head_dim)
        }
        self.width = together * calibration.head_dim
        self.order = []
        for x in calibration.layers:
            total = torch.zeros(heads * calibration.head_dim, device=calibration.device)
            for keys in x.k.split(calibration.seq_lens):
                total += self.rotated(keys.transpose(0, 1)[None])[0].sum(0)
            self.order.append(total.argsort())

    def rotated(self, k: torch.Tensor) -> torch.Tensor:
        """[batch, kv_heads, n, d] after RoPE -> [batch, n, kv_heads d], before RoPE and behind the Hadamard matrix."""
        cos, sin = self.rotary(k.shape[2])
        flat = turned(k.float(), cos, -sin).transpose(1, 2).flatten(2)
        return (flat.unflatten(2, (-1, self.width)) @ self.hadamard[self.width]).flatten(2)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        order = self.order[layer]
        coded = torch.empty_like(flat := self.rotated(k))
        coded[..., order] = uniform(flat[..., order], 2, -1, self.group, span=RANGE)
        back = (coded.unflatten(2, (-1, self.width)) @ self.hadamard[self.width]).flatten(2)
        return turned(back.unflatten(2, (k.shape[1], -1)).transpose(1, 2), *self.rotary(k.shape[2]))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        matrix = self.hadamard[v.shape[-1]]
        return uniform(v.float() @ matrix, 2, -1, min(GROUP, v.shape[-1]), span=RANGE) @ matrix

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`."""
        return uniform_bits(2, self.group), uniform_bits(2, min(GROUP, head_dim))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first r of d channels, [batch, heads, n, d] by tables [n, r]; the negative sine undoes
    it."""
    turning, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, still], -1)


METHODS = [RotateKV]
