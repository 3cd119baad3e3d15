"""KIVI: keys per channel over blocks of tokens, values per token, and a residual of newest tokens in 16 bits."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.attention import Schedule
from accuracy.methods.base import Method
from accuracy.quantizers import SIXTEEN, uniform, uniform_bits


def blocks_exact_from(schedule: Schedule, sink: int, block: int) -> torch.Tensor:
    """First exact position where keys are quantized in whole blocks of tokens behind the sink: int64 [n].

    A block is quantized when it is full; tokens of the query's own chunk are exact.
    """
    whole = sink + (schedule.seen - sink).clamp_min(0) // block * block
    positions = torch.arange(schedule.length)
    return torch.where(positions >= schedule.decode_from, whole, torch.minimum(whole, schedule.chunk_starts))


def per_channel(
    k: torch.Tensor, sink: int, block: int, quantizer: partial[torch.Tensor] | None = None, bits: int = 2
) -> torch.Tensor:
    """Quantize every channel over blocks of ``block`` tokens behind ``sink``; a last broken block stays as it is.

    Args:
        k: [batch, heads, n, d].
        quantizer: of [batch, heads, blocks, block, d]; round to nearest with ``bits`` along dim -2 by default.

    Returns:
        float32 of the shape of ``k``.
    """
    out = k.float().clone()
    count = max(0, (k.shape[2] - sink) // block)
    if count:
        span = slice(sink, sink + count * block)
        tiles = out[:, :, span].unflatten(2, (count, block))
        coded = uniform(tiles, bits, -2, block) if quantizer is None else quantizer(tiles)
        out[:, :, span] = coded.flatten(2, 3)
    return out


class Kivi(Method):
    """KIVI-2; with 16-bit initial tokens it is the starred row of OSCAR, table 1.

    Blocks of 128 tokens for keys and groups of 128 channels for values, as in that table; a block that is not full is
    the residual of the keys, the newest 128 tokens that of the values.
    """

    source = "Liu et al. 2024 (arXiv 2402.02750), group and residual 128 as in OSCAR, table 1"
    bits, block = 2, 128

    def __init__(self, sink: int = 0) -> None:
        self.sink, self.recent = sink, self.block
        self.name = "KIVI-2*" if sink else "KIVI-2"

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return per_channel(k, self.sink, self.block, bits=self.bits)

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return uniform(v, self.bits, -1, min(self.block, v.shape[-1]))

    def exact_from(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Method`."""
        return blocks_exact_from(schedule, self.sink, self.block), super().exact_from(schedule)[1]

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`."""
        return uniform_bits(self.bits, self.block), uniform_bits(self.bits, min(self.block, head_dim))

    def bits_per_element(self, head_dim: int, context: int = 131072) -> float:
        """As published: the residual, which a long context outgrows, is not counted, the initial tokens are."""
        stored = sum(self.stored_bits(head_dim)) / 2
        return stored + (SIXTEEN - stored) * min(context, self.sink) / context


METHODS = [Kivi, partial(Kivi, sink=32)]
