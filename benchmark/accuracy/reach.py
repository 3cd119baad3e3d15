"""What the attention of a layer runs over, and attention to exact keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK_SCORES = 1 << 26
"""Scores of a block of queries: 256 MB in float32."""


@dataclass(frozen=True)
class Reach:
    """What a layer's softmax runs over besides all tokens up to the query's.

    Attributes:
        sinks: [q_heads], a logit of every head that has no value (gpt-oss); None for none.
        window: newest tokens that a query sees, itself among them; None for all.
    """

    sinks: torch.Tensor | None = None
    window: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the softmax runs over all tokens up to the query's and nothing else."""
        return self.sinks is None and self.window is None

    @classmethod
    def of(cls, module: Any) -> Reach:
        """Of an attention layer of transformers, which may have a window only where layers are of several kinds."""
        kind = getattr(module, "layer_type", None)
        window = module.sliding_window if kind == "sliding_attention" else None
        return cls(getattr(module, "sinks", None), window)

    def weights(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """Attention of queries at the positions ``rows`` to all tokens before the end of ``rows``, from logits
        [batch, kv_heads, group, rows, stop], which are overwritten: the same shape."""
        positions = torch.arange(rows.stop, device=scores.device)
        future = positions[rows.start :] > positions[rows, None]
        scores[..., rows.start :].masked_fill_(future, float("-inf"))
        if self.window is not None:
            scores.masked_fill_(positions <= positions[rows, None] - self.window, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        of_heads = self.with_sinks(scores.flatten(1, 2)).softmax(-1)[..., :-1]
        return of_heads.unflatten(1, scores.shape[1:3])

    def with_sinks(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [batch, q_heads, queries, n] with the sink's behind them, [..., n + 1]; as they are without sinks."""
        if self.sinks is None:
            return logits
        return torch.cat([logits, self.sinks.to(logits)[None, :, None, None].expand(*logits.shape[:3], 1)], -1)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, scale: float, reach: Reach
) -> torch.Tensor:
    """Causal attention of queries at positions ``offset`` and on; k and v have as many heads as q and may go on."""
    m, last = q.shape[2], offset + q.shape[2]
    k, v = k[:, :, :last], v[:, :, :last]
    if not reach.plain:
        step = max(1, BLOCK_SCORES // (q.shape[0] * q.shape[1] * last))
        parts = []
        for start in range(offset, last, step):
            rows = slice(start, min(start + step, last))
            scores = (q[:, :, rows.start - offset : rows.stop - offset] * scale) @ k[:, :, : rows.stop].mT
            parts.append(reach.weights(scores[:, :, None], rows)[:, :, 0] @ v[:, :, : rows.stop])
        return torch.cat(parts, 2)
    if offset == 0:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    visible = torch.ones(m, last, dtype=torch.bool, device=q.device).tril(offset)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
