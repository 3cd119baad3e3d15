"""Causal attention with a sliding window and sink logits in plain torch, over keys and values as they are."""

from __future__ import annotations

import torch

from oscar_kernels.weighted_sum import weighted_sum

QUERY_BLOCK = 512
"""Queries per block: bounds the scores to block x keys per head."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of a sequence; arithmetic is float32.

    Args:
        q: [queries, q_heads, head_dim], of the last ``queries`` tokens.
        k, v: [tokens, kv_heads, head_dim], the heads of ``v`` of any size.
        sm_scale: factor on the logits.
        window: tokens before its own that a query sees; None for all.
        sinks: [q_heads], sink logits (:mod:`oscar_kernels.sink_logits`); None for a model without.
        visible: bool [queries, queries], which of these tokens sees which, where they are a tree of drafts: a window
            then ends at a token's depth. None where each sees those before it.

    Returns:
        float32 [queries, q_heads, head_dim of ``v``].
    """
    queries, tokens, kv_heads = len(q), len(k), k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=torch.float32, device=q.device)
    for start in range(0, queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, queries)
        own = torch.arange(start, stop, device=q.device) + (tokens - queries)
        position = own if visible is None else visible[start:stop].sum(-1) - 1 + (tokens - queries)
        first = 0 if window is None else max(start + tokens - queries - window, 0)
        seen = torch.arange(first, stop + tokens - queries, device=q.device)
        heads = q[start:stop].float().unflatten(1, (kv_heads, -1)) * sm_scale
        logits = torch.einsum("qhgd,thd->hgqt", heads, k[seen].float())
        hidden = seen > own[:, None]
        if visible is not None:
            new = seen >= tokens - queries
            hidden[:, new] |= ~visible[start:stop, seen[new] - (tokens - queries)]
        if window is not None:
            hidden |= seen < position[:, None] - window
        logits.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = logits.softmax(-1)[..., : len(seen)]
        out[start:stop] = weighted_sum(weights, v[seen].float(), ~hidden).flatten(1, 2)
    return out
