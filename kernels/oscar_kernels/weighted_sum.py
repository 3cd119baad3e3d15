"""Sums of values in which what is not seen is left out, not multiplied by zero: 0 x NaN is NaN."""

from __future__ import annotations

import torch


def weighted_sum(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Weighted sums of the values that each query sees.

    Args:
        weights: [kv_heads, heads per kv head, queries, tokens], 0 for what is not seen.
        values: [tokens, kv_heads, head_dim], whatever numbers.
        seen: bool [queries, tokens].

    Returns:
        [queries, kv_heads, heads per kv head, head_dim]; not a number only for queries that see such a value.
    """
    broken = ~values.isfinite().flatten(1).all(1)
    out = torch.einsum("hgqt,thd->qhgd", weights, values.masked_fill(broken[:, None, None], 0.0))
    for token in broken.nonzero().flatten().tolist():
        who = seen[:, token]
        out[who] += weights[:, :, who, token].permute(2, 0, 1)[..., None] * values[token][:, None]
    return out
