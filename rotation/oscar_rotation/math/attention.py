"""Exact causal attention of several kv heads, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

MIN_ROWS = 512
"""Score rows per head and block at least, however long the request."""

BLOCK_SCORES = 1 << 26
"""Scores per block, all heads together: 256 MB in float32, enough work per launch."""


def attention_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int], sm_scale: float
) -> Iterator[torch.Tensor]:
    """Outputs S V of the query heads that share a kv head, softmax(q k^T * sm_scale) causal within each request.

    Args:
        q: [heads, tokens, group, head_dim], float32 or float64; heads are kv heads, group their query heads.
        k, v: [heads, tokens, head_dim], same dtype and device.
        seq_lens: request lengths; they sum to tokens. Tokens see only their own request.
        sm_scale: factor on the logits.

    Yields:
        [heads, rows, head_dim] blocks, in an order of rows that callers must not rely on; together tokens * group
        rows. Memory is one block of scores, never tokens x tokens.
    """
    # On a CPU the fused kernel is tiled in every precision and several times as fast. On a GPU it would fall back
    # to tokens x tokens scores in float64, and the blocks below are fast enough.
    attend = _fused if q.device.type == "cpu" else _blocked
    yield from attend(q, k, v, seq_lens, sm_scale)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int], sm_scale: float
) -> Iterator[torch.Tensor]:
    heads, _, group, head_dim = q.shape
    begin = 0
    for length in seq_lens:
        span = slice(begin, begin + length)
        queries = q[:, span].transpose(1, 2)
        keys, values = (x[:, None, span].expand(heads, group, length, head_dim) for x in (k, v))
        outputs = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=sm_scale)
        yield outputs.reshape(heads, -1, head_dim)
        begin += length


def _blocked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int], sm_scale: float
) -> Iterator[torch.Tensor]:
    heads, _, group, head_dim = q.shape
    scaled = q * sm_scale
    begin = 0
    for length in seq_lens:
        rows = max(MIN_ROWS, BLOCK_SCORES // (heads * length))
        step = min(length, max(1, rows // group))
        later = torch.ones(step, step, dtype=torch.bool, device=q.device).triu(1)
        keys, values = k[:, begin : begin + length], v[:, begin : begin + length]
        for start in range(0, length, step):
            stop = min(start + step, length)
            size = stop - start
            block = scaled[:, begin + start : begin + stop].transpose(1, 2).reshape(heads, -1, head_dim)
            scores = block @ keys[:, :stop].mT
            # Only the last `size` keys can lie in the future of a query of this block.
            scores.view(heads, group, size, stop)[..., start:].masked_fill_(later[:size, :size], float("-inf"))
            yield torch.softmax(scores, dim=-1) @ values[:, :stop]
        begin += length
