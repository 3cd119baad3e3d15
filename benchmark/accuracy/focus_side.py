"""What :mod:`accuracy.focus_fit` takes and gives: requests, what is tried, and transforms with centers that turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.rotary_center import RotaryCenter
from oscar_rotation.recipes.plus import CLIP_RATIO, KEY_GAIN


@dataclass(frozen=True)
class FocusOptions:
    """What is tried, and what rows are made of.

    Attributes:
        group: channels that share a scale.
        key_levels, value_levels: of a code.
        shares: of the attention's weights in the moments, the rest is uniform; every one is tried.
        value_shares: the same for values.
        query_shares: the same for the moment of queries.
        turning: centers that are tried, with and without a part that turns with the position.
        rounds: further rounds with weights from the transform before.
        per_head: whether kv heads have transforms of their own; otherwise one serves the layer.
        value_centers: whether values lose their mean, which attention gives back whole because its weights sum to 1.
        clips, gains: that are tried for keys; the first of each is used while transforms are chosen.
        value_clips: that are tried for values.
        held_out: share of the requests that choices are made on.
    """

    group: int = 64
    key_levels: int = 4
    value_levels: int = 4
    shares: tuple[float, ...] = (0.5, 0.9)
    value_shares: tuple[float, ...] = (0.0, 0.5)
    query_shares: tuple[float, ...] = (0.0,)
    turning: tuple[bool, ...] = (False, True)
    rounds: int = 0
    per_head: bool = True
    value_centers: bool = True
    clips: tuple[float, ...] = (CLIP_RATIO, 1.0, 0.96, 0.92, 0.84)
    gains: tuple[float, ...] = (KEY_GAIN, 1.0, 0.96, 0.94, 0.92)
    value_clips: tuple[float, ...] = (CLIP_RATIO, 0.96, 0.92, 0.84)
    held_out: float = 0.25


@dataclass(frozen=True)
class Request:
    """One request at one layer.

    Attributes:
        q: float32 [heads, n, group, d], after RoPE; heads are kv heads, group their query heads.
        k, v: float32 [heads, n, d].
        tables: cosines and sines of the rotary embedding, [n, r] each.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class FocusSide:
    """Keys or values of one layer.

    Attributes:
        transform, back: float32 [heads, d, d]; what is stored is (x - center) @ transform, and ``back`` undoes it.
        center: of the layer.
        clip, gain: of the rows.
        loss: float32 [heads], of the held-out requests.
        chosen: per head, what won.
    """

    transform: torch.Tensor
    back: torch.Tensor
    center: RotaryCenter
    clip: float
    gain: float
    loss: torch.Tensor
    chosen: tuple[str, ...] = ()

    def into(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[..., heads, n, d] -> the basis of the cache."""
        return (x - self.center.at(*tables)) @ self.transform

    def out(self, y: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Inverse of :meth:`into`."""
        return y @ self.back + self.center.at(*tables)

    def read(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], group: int, levels: int) -> torch.Tensor:
        """What the cache gives back for ``x``."""
        return self.out(coded(self.into(x, tables), group, self.clip, self.gain, levels), tables)


@dataclass(frozen=True)
class FocusLayer:
    """Both sides of one layer."""

    key: FocusSide
    value: FocusSide
