"""How much of what queries read of keys their codes get wrong: one measure, for fits and for servers."""

from __future__ import annotations

import torch

from oscar_kernels.codec import decode_rows
from oscar_kernels.format import SideFormat
from oscar_kernels.layout import RowLayout
from oscar_kernels.reference import rotate

LEAST, MOST = 128, 256
"""Tokens of a pass or a request that is measured at least, and those at its end that are."""


def transformed(k: torch.Tensor, side: SideFormat) -> torch.Tensor:
    """Keys [tokens, kv_heads, head_dim] as they are before codes: float32 of that shape."""
    y = rotate(k, side.transform.matrix)
    return y if side.transform.center is None else y - side.transform.center


def logit_errors(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, side: SideFormat, layout: RowLayout
) -> torch.Tensor:
    """Squared error of logits by the codes of keys, and their square, what all keys have in common left out, as softmax
    does.

    Args:
        q: [tokens, q_heads, head_dim], after RoPE.
        k: [tokens, kv_heads, head_dim], after RoPE.
        rows: uint8 [tokens, row_bytes], as stored.
        side: how; its tensors on the device of ``k``.
        layout: of the rows.

    Returns:
        float32 [2], sums over heads, queries and keys; zeros where they are not finite.
    """
    y = transformed(k, side)
    error = y - decode_rows(rows, layout, side.codebook)
    queries = rotate(q, side.transform.reading).unflatten(1, (y.shape[1], -1))
    logits = (torch.einsum("qhgd,khd->hgqk", queries, x) for x in (error, y))
    sums = torch.stack([(x - x.mean(-1, keepdim=True)).square().sum() for x in logits])
    # A request that is NaN, or endless, does not count.
    return torch.where(sums.isfinite().all(), sums, 0)
