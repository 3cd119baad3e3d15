"""What reads attention outputs: output projections of a loaded model, whatever their weights are stored as.

A projection is asked for the outputs of single channels, by the code that serves it, so that GPTQ, AWQ, FP8 and
formats to come need no reader of their own.
"""

from __future__ import annotations

from typing import Any

import torch

ROWS = 1024
"""Channels that a projection is asked for at once."""


def output_projections(model: Any) -> dict[int, Any]:
    """Output projections of a loaded model by attention layer: the one linear layer beside it that takes what it
    computes."""
    from sglang.srt.layers.linear import RowParallelLinear
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = {}
    for module in model.modules():
        beside = list(module.children())
        for attention in (child for child in beside if isinstance(child, RadixAttention)):
            width = attention.tp_q_head_num * attention.v_head_dim
            takes = [c for c in beside if isinstance(c, RowParallelLinear) and c.input_size_per_partition == width]
            if len(takes) == 1:
                found[attention.layer_id] = takes[0]
    return found


def reader_of(projection: Any, q: torch.Tensor) -> torch.Tensor:
    """W^T W by query head of this rank's part of a projection: float32 [q_heads, v_head_dim, v_head_dim].

    Args:
        projection: SGLang's RowParallelLinear.
        q: [tokens, q_heads of this rank, head_dim], of what device and dtype it computes.
    """
    width = projection.input_size_per_partition
    unit = torch.eye(width, dtype=q.dtype, device=q.device)
    rows = [projection.quant_method.apply(projection, part, None).float() for part in unit.split(ROWS)]
    heads = torch.cat(rows).view(q.shape[1], width // q.shape[1], -1)
    return heads @ heads.transpose(1, 2)
