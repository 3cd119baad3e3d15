"""Points that codes of keys stand for: every four neighbouring channels of a kv head have 256 of their own.

A code of eight bits is the index of a point, so a channel takes two bits. Points are whole numbers of eight bits, which
integer tensor cores multiply; what makes them as large as they are, one factor for the points of four channels, is
multiplied into the queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

POINTS = 256
"""Points of a group: what an index of eight bits can say."""
GROUP = 4
"""Neighbouring channels whose numbers are one point."""
LARGEST = 127
"""Magnitude of the largest whole number of a group's points."""
LEAST_FACTOR = 1e-12
"""So that a group whose points are all zeros has a factor."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """Points of all kv heads of a layer.

    Args:
        points: int8 [kv_heads, head_dim // 4, 256, 4], contiguous. Point ``i`` of group ``b`` holds channels ``4b`` to
            ``4b + 3``.
        factor: float32 [kv_heads, head_dim // 4], contiguous, positive: what the points of a group are multiplied by.

    Attributes:
        shared: whether all kv heads and all groups have the same points; their factors may differ. Known from the
            start, as nothing can be asked of a GPU while a graph is captured.

    Raises:
        ValueError: a shape, a dtype or a factor does not fit.
    """

    points: torch.Tensor
    factor: torch.Tensor
    shared: bool = field(init=False)

    def __post_init__(self) -> None:
        points, factor = self.points, self.factor
        if points.dtype != torch.int8 or points.dim() != 4 or points.shape[2:] != (POINTS, GROUP):
            raise ValueError(
                f"points of a codebook must be int8 [kv_heads, head_dim / {GROUP}, {POINTS}, {GROUP}], "
                f"got {points.dtype} {list(points.shape)}"
            )
        if factor.dtype != torch.float32 or factor.shape != points.shape[:2]:
            raise ValueError(
                f"factor of a codebook must be float32 {list(points.shape[:2])}, "
                f"got {factor.dtype} {list(factor.shape)}"
            )
        if not points.is_contiguous() or not factor.is_contiguous():
            raise ValueError("points and factor of a codebook must be contiguous")
        if not bool(((factor > 0) & (factor < torch.inf)).all()):
            raise ValueError("factors of a codebook must be positive and finite")
        object.__setattr__(self, "shared", bool((points == points[:1, :1]).all()))

    @staticmethod
    def from_points(points: torch.Tensor) -> Codebook:
        """Round points to eight bits: the largest number of a group becomes 127 or -127.

        Args:
            points: float [kv_heads, head_dim // 4, 256, 4].

        Raises:
            ValueError: the shape does not fit, or a number is not finite.
        """
        points = points.float()
        if points.dim() != 4 or not bool(points.isfinite().all()):
            raise ValueError(
                f"points of a codebook must be finite [kv_heads, head_dim / {GROUP}, {POINTS}, {GROUP}], "
                f"got {list(points.shape)}"
            )
        factor = (points.abs().amax((-2, -1)) / LARGEST).clamp_min(LEAST_FACTOR)
        return Codebook((points / factor[..., None, None]).round().to(torch.int8).contiguous(), factor.contiguous())

    @staticmethod
    def from_shared(points: torch.Tensor, lengths: torch.Tensor) -> Codebook:
        """Points that all kv heads and groups share, rounded as in :meth:`from_points`, times a length of each.

        Args:
            points: float [256, 4].
            lengths: float32 [kv_heads, head_dim // 4], positive.
        """
        one = Codebook.from_points(points[None, None])
        return Codebook(one.points.repeat(*lengths.shape, 1, 1), one.factor * lengths)

    @property
    def kv_heads(self) -> int:
        """kv heads that have points."""
        return self.points.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.points.shape[1] * GROUP

    @cached_property
    def values(self) -> torch.Tensor:
        """What the points stand for, the scale of a vector aside: float32 [kv_heads, head_dim // 4, 256, 4]."""
        return self.factor[..., None, None] * self.points

    def of_heads(self, heads: slice) -> Codebook:
        """Points of some of the kv heads, such as those of a tensor-parallel rank."""
        return Codebook(self.points[heads].contiguous(), self.factor[heads].contiguous())

    def to(self, device: torch.device | str) -> Codebook:
        """The same on another device."""
        return Codebook(self.points.to(device), self.factor.to(device))

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Indices of the points nearest to vectors, the lowest of equals.

        Args:
            x: float32 [tokens, kv_heads, head_dim].

        Returns:
            uint8 [tokens, kv_heads, head_dim // 4].
        """
        half = self.values.square().sum(-1) / 2
        found = []
        # Not all at once: the scores of 256 points take 64 times the memory of the vectors.
        for some in x.split(max(1, (1 << 24) // max(POINTS * x.shape[1:].numel() // GROUP, 1))):
            grouped = some.unflatten(-1, (-1, GROUP))
            scores = torch.einsum("thbc,hbpc->thbp", grouped, self.values) - half
            found.append(scores.argmax(-1).to(torch.uint8))
        return torch.cat(found)

    def look_up(self, index: torch.Tensor) -> torch.Tensor:
        """Points by index: uint8 [tokens, kv_heads, head_dim // 4] -> float32 [tokens, kv_heads, head_dim]."""
        heads, groups = (torch.arange(size, device=index.device) for size in self.points.shape[:2])
        return self.values[heads[:, None], groups, index.long()].flatten(-2)
