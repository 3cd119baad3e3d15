"""Exact causal attention of several kv heads, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

MIN_ROWS = 512
"""Score rows per head and block at least, however long the request."""

BLOCK_SCORES = 1 << 26
"""Scores per block, all heads together: 256 MB in float32, enough work per launch."""


def attention_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: Sequence[int],
    sm_scale: float,
    sinks: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Outputs S V of the query heads that share a kv head, softmax(q k^T * sm_scale) causal within each request.

    Args:
        q: [heads, tokens, group, head_dim], float32 or float64; heads are kv heads, group their query heads.
        k, v: [heads, tokens, head_dim], same dtype and device; heads of ``v`` may have another size.
        seq_lens: request lengths; they sum to tokens. Tokens see only their own request.
        sm_scale: factor on the logits.
        sinks: [heads, group], sink logits: each softmax also runs over that of its query head, which has no value;
            None for a softmax over tokens only.

    Yields:
        [heads, rows, head_dim of ``v``] blocks, in an order of rows that callers must not rely on; together tokens *
        group rows. Memory is one block of scores, never tokens x tokens.
    """
    # On a CPU the fused kernel is tiled in every precision and several times as fast. On a GPU it would fall back
    # to tokens x tokens scores in float64, and the blocks below are fast enough.
    attend = _fused if q.device.type == "cpu" else _blocked
    yield from attend(q, k, v, seq_lens, sm_scale, None if sinks is None else sinks.to(q))


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: Sequence[int],
    sm_scale: float,
    sinks: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    heads, _, group, _ = q.shape
    # The kernel wants values as wide as keys.
    channels = v.shape[-1]
    width = max(q.shape[-1], channels)
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    begin = 0
    for length in seq_lens:
        span = slice(begin, begin + length)
        queries = q[:, span].transpose(1, 2)
        keys, values = k[:, span], v[:, span]
        if sinks is not None:
            # A token in front, which all see and whose value is zero. One more channel makes its logit: the sink's in
            # every query, 1 in this key and 0 in the others.
            queries, keys, values = (pad(x, (0, 1, 1, 0)) for x in (queries, keys, values))
            queries[..., -1] = sinks[..., None] / sm_scale
            keys[:, 0, -1] = 1
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        outputs = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=sm_scale)
        if sinks is not None:
            outputs = outputs[:, :, 1:]
        yield outputs[..., :channels].reshape(heads, -1, channels)
        begin += length


def _blocked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: Sequence[int],
    sm_scale: float,
    sinks: torch.Tensor | None,
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
            if sinks is None:
                weights = torch.softmax(scores, dim=-1)
            else:
                column = sinks[..., None].expand(-1, -1, size).reshape(heads, -1, 1)
                weights = torch.softmax(torch.cat([scores, column], -1), dim=-1)[..., :-1]
            yield weights @ values[:, :stop]
        begin += length
