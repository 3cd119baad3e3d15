"""Kitty: KIVI's layout in which an eighth of the key channels of every page is kept in four bits."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.methods.kivi import Kivi, per_channel
from accuracy.quantizers import uniform, uniform_bits


def boosted(tiles: torch.Tensor, share: float) -> torch.Tensor:
    """2-bit channels over the tokens of a page, the ``share`` of widest ones in 4 bits.

    The paper ranks channels by sensitivity; here that is the range of the channel within the page, which is what
    bounds the error of rounding it.

    Args:
        tiles: [..., tokens of a page, d].
    """
    page, d = tiles.shape[-2:]
    span = tiles.amax(-2) - tiles.amin(-2)
    chosen = torch.zeros_like(span, dtype=torch.bool)
    chosen.scatter_(-1, span.topk(round(share * d), dim=-1).indices, True)
    return torch.where(chosen.unsqueeze(-2), uniform(tiles, 4, -2, page), uniform(tiles, 2, -2, page))


class Kitty(Kivi):
    """12.5% of the key channels of a 128-token page in INT4, all else INT2; 32 initial tokens in 16 bits."""

    source = "Xia et al. 2025 (arXiv 2511.18643), 12.5% boost as in OSCAR, table 1"
    share = 0.125

    def __init__(self) -> None:
        super().__init__(sink=32)
        self.name = "Kitty"

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return per_channel(k, self.sink, self.block, partial(boosted, share=self.share))

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Twice the code bits for the boosted share; the list of boosted channels, 7 bits each a page, is left out."""
        return uniform_bits(self.bits * (1 + self.share), self.block), super().stored_bits(head_dim)[1]


METHODS = [Kitty]
