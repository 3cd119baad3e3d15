"""Output projections of a loaded model: which they are, and what they do with weights that nobody else can read."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from oscar_rotation.fit.output_weights import reader_of as reader_of_weight
from sglang_oscar.formats import output_readers

HEADS, D, HIDDEN = 40, 32, 48
"""More channels than are asked for at once."""


class Packed:
    """A format of weights: two numbers of four bits in a byte, and a scale."""

    def __init__(self) -> None:
        codes = torch.randint(0, 16, (HIDDEN, HEADS * D), generator=torch.Generator().manual_seed(1))
        self.packed, self.scale = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), 0.25
        self.weight = (codes - 8) * self.scale

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1).to(x.dtype)
        return x @ ((codes - 8) * self.scale).T


def part(kind: type[nn.Module], **fields: Any) -> Any:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def layer(number: int, *widths: int) -> nn.Module:
    made = nn.Module()
    made.attn = part(RadixAttention, layer_id=number, tp_q_head_num=HEADS, v_head_dim=D)
    for index, width in enumerate(widths):
        setattr(made, f"row{index}", part(RowParallelLinear, input_size_per_partition=width, quant_method=Packed()))
    return made


def test_the_projection_beside_attention() -> None:
    """Not a linear layer of another width, and none where two would do."""
    model = nn.ModuleList([layer(3, 7, HEADS * D), layer(5), layer(6, HEADS * D, HEADS * D)])
    assert output_readers.output_projections(model) == {3: model[0].row1}


def test_weights_of_any_format() -> None:
    projection = layer(0, HEADS * D).row0
    found = output_readers.reader_of(projection, torch.zeros(2, HEADS, D))
    torch.testing.assert_close(found, reader_of_weight(projection.quant_method.weight, HEADS, D))
