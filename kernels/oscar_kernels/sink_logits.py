"""Sink logits: a number per head that a softmax runs over besides the logits of the tokens, of a value of zero.

Attention without it and its log-sum-exp say all that is needed: with ``s`` the sink logit and ``l`` the log-sum-exp,
tokens keep ``e^l / (e^l + e^s) = sigmoid(l - s)`` of their weight. So no kernel knows of sink logits.

A sink logit is absolute: what shifts the logits of all tokens alike, and is invisible to a softmax over tokens only,
counts here. That is the center of stored keys.
"""

from __future__ import annotations

import math

import torch


def scale_by_sinks(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    q: torch.Tensor,
    center: torch.Tensor | None,
    sm_scale: float,
) -> torch.Tensor:
    """Attention with sink logits from attention without.

    Args:
        out: [tokens, q_heads, head_dim], attention over tokens only.
        lse: float32 [tokens, q_heads], log2 of the sum of exp2 of its logits (times log2 e), -inf for no tokens.
        sinks: [q_heads], of the heads of this rank.
        q: [tokens, q_heads, head_dim], queries that are not rotated.
        center: what all keys that were attended to lack, in the basis of ``q``: float32 [kv_heads, head_dim]; None for
            nothing.
        sm_scale: factor on the logits; sink logits have none.

    Returns:
        the result in the dtype of ``out``; zeros where nothing was attended to.
    """
    logits = lse * math.log(2) - sinks.float()
    if center is not None:
        heads = q.float().unflatten(1, (len(center), -1))
        logits = logits + torch.einsum("thgd,hd->thg", heads, center).flatten(1) * sm_scale
    return (out * torch.sigmoid(logits)[..., None]).to(out.dtype)
