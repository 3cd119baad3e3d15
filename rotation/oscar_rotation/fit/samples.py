"""Requests on which clip ratios and errors are measured, and the attention error they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from oscar_rotation.math.attention import attention_outputs

LONGEST = 1024
"""Tokens used of one request. A causal prefix is exact on its own."""

SINK = 64
"""First tokens of a request that a server keeps in 16 bits; at most a quarter of a short request."""


def plan_samples(seq_lens: Mapping[int, Sequence[int]], tokens: int) -> dict[int, int]:
    """Choose whole requests from the end of a calibration set.

    Args:
        seq_lens: chunk -> request lengths, in order.
        tokens: tokens wanted. Of all tokens at most a quarter is taken, but at least one request.

    Returns:
        chunk -> number of its first chosen request; the later ones of that chunk are chosen too. Chunks of which
        nothing is chosen are absent. The first request of the set is never chosen, so one is left to fit on.
    """
    first: dict[int, int] = {}
    usable, whole, everything = 0, 0, sum(map(sum, seq_lens.values()))
    chunks = list(seq_lens)
    for chunk in reversed(chunks):
        for request in reversed(range(len(seq_lens[chunk]))):
            length = seq_lens[chunk][request]
            is_only_one_left = chunk == chunks[0] and request == 0
            if usable >= tokens or is_only_one_left or (usable and whole + length > everything // 4):
                return first
            first[chunk] = request
            usable += min(length, LONGEST)
            whole += length
    return first


@dataclass(frozen=True)
class HeadSample:
    """One kv head of one request.

    Attributes:
        head: kv head.
        q: [tokens, group, head_dim] float32, after RoPE.
        k, v: [tokens, head_dim] float32.
        exact: [tokens * group, head_dim] attention outputs without quantization.
        sm_scale: factor on the logits.
        sinks: [group], sink logits of the query heads; None for a layer without.
    """

    head: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    exact: torch.Tensor
    sm_scale: float
    sinks: torch.Tensor | None = None

    @property
    def sink(self) -> int:
        """Leading tokens that stay exact."""
        return min(SINK, self.k.shape[0] // 4)

    def outputs(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """Attention outputs with other keys or values (their sink tokens are taken from the exact ones)."""
        keys, values = (
            exact if other is None else torch.cat([exact[: self.sink], other[self.sink :]])
            for exact, other in ((self.k, k), (self.v, v))
        )
        return _outputs(self.q, keys, values, self.sm_scale, self.sinks)

    def error(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> float:
        """||outputs - exact||^2, summed over tokens, query heads and channels."""
        return float((self.outputs(k, v) - self.exact).square().sum(dtype=torch.float64))

    @property
    def energy(self) -> float:
        """||exact||^2, what errors are relative to."""
        return float(self.exact.square().sum(dtype=torch.float64))


def head_samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: Sequence[int],
    sm_scale: float,
    sinks: torch.Tensor | None = None,
) -> list[HeadSample]:
    """Split chunked requests into samples.

    Args:
        q: [tokens, q_heads, head_dim], after RoPE; any float dtype.
        k, v: [tokens, kv_heads, head_dim].
        seq_lens: request lengths; they sum to tokens.
        sm_scale: factor on the logits.
        sinks: [q_heads], sink logits of the layer; None for a layer without.

    Returns:
        one sample per request and kv head, requests cut to :data:`LONGEST` tokens.
    """
    samples, begin = [], 0
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    by_head = [None] * kv_heads if sinks is None else sinks.to(q.device).split(group)
    for length in seq_lens:
        span = slice(begin, begin + min(length, LONGEST))
        for head in range(kv_heads):
            queries = q[span, head * group : (head + 1) * group].float().contiguous()
            keys, values = k[span, head].float().contiguous(), v[span, head].float().contiguous()
            exact = _outputs(queries, keys, values, sm_scale, by_head[head])
            samples.append(HeadSample(head, queries, keys, values, exact, sm_scale, by_head[head]))
        begin += length
    return samples


def _outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention outputs of one kv head of one request: [tokens * group, head_dim]."""
    own = None if sinks is None else sinks[None]
    return torch.cat(list(attention_outputs(q[None], k[None], v[None], [len(k)], sm_scale, own)), 1)[0]
