"""How much an error of a key or a value counts, by the attention that it gets; block by block, never tokens x tokens.

A key error e_j moves the logit of query i by d_ij = q_i . e_j (times the scale of attention). To second order the
distribution of query i then moves by KL = 1/2 Var_p(d_i), and for errors that are independent from key to key the mean
of that variance is the sum over j of p_ij (1 - p_ij) d_ij^2. So

    u_ij = p_ij (1 - p_ij)

is what the pair (i, j) counts: nothing where a query does not look, and nothing where it looks at one key alone, which
softmax does not notice. A value error reaches the output as p_ij e_j and counts p_ij^2.

Pairs that a server reads in 16 bits do not count: keys of the sink, and keys within the recent window of the query.
A sink logit is one more outcome of the softmax, which has no key and so no error: it takes its part of every p.

Later keys of a request have fewer readers that far behind them than earlier ones; every u_ij is divided by the number
of readers of its key, so that the end of a calibration request is worth as much as its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

SINK, RECENT = 64, 256
"""Tokens at either end that a server keeps in 16 bits."""

BLOCK_SCORES = 1 << 25
"""Scores per block, all heads together: 128 MB in float32."""


READERS = 1024
"""Queries of a request that say how much its keys are read: time would grow with the square of its length otherwise."""


@dataclass(frozen=True)
class Exact:
    """Tokens of a request that are read exactly: the first ``sink``, and the last ``recent`` before a query."""

    sink: int
    recent: int

    @classmethod
    def of(cls, length: int) -> Exact:
        """The server's windows, smaller where a calibration request is too short for them to leave much."""
        return cls(min(SINK, length // 8), min(RECENT, length // 4))


@dataclass(frozen=True)
class Sensitivity:
    """What errors count, of one request.

    Attributes:
        keys: float32 [heads, n], of key errors.
        queries: float32 [heads, n, group], of the logit errors of each query.
        values: float32 [heads, n], of value errors.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor


def scores_of(
    q: torch.Tensor, k: torch.Tensor, scale: float, first: int = 0, stride: int = 1
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Causal logits of one request, block by block.

    Args:
        q: [heads, n, group, d]; heads are kv heads, group their query heads.
        k: [heads, n, d].
        scale: factor on the logits.
        first: position of the first query.
        stride: from one query to the next.

    Yields:
        positions of a block of queries, its logits [heads, rows, group, stop] (-inf in the future), and the distance
        of every key to every query, int64 [rows, stop].
    """
    heads, n, group, _ = q.shape
    step = stride * max(1, BLOCK_SCORES // (heads * group * n))
    for start in range(first, n, step):
        rows = slice(start, min(start + step, n), stride)
        positions = torch.arange(rows.start, rows.stop, stride, device=q.device)
        stop = int(positions[-1]) + 1
        block = (q[:, rows] * scale).flatten(1, 2) @ k[:, :stop].mT
        away = positions[:, None] - torch.arange(stop, device=q.device)
        logits = block.unflatten(1, (len(positions), group))
        yield rows, logits.masked_fill_(away[:, None] < 0, float("-inf")), away


def with_sinks(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Logits that a softmax runs over.

    Args:
        logits: of tokens, [heads, rows, group, n].
        sinks: [heads, group], sink logits; None for none.

    Returns:
        [heads, rows, group, n], or n + 1, the sink logit last.
    """
    if sinks is None:
        return logits
    return torch.cat([logits, sinks[:, None, :, None].to(logits).expand(*logits.shape[:3], 1)], -1)


def attention_of(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """What tokens get of the attention, [heads, rows, group, n]; with sink logits less than 1 in all. Arguments as of
    :func:`with_sinks`."""
    return with_sinks(logits, sinks).softmax(-1)[..., : logits.shape[-1]]


def sensitivity(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    reading: torch.Tensor | None = None,
    stored: torch.Tensor | None = None,
) -> Sensitivity:
    """What errors of keys and values count in one request.

    Args:
        q: float32 [heads, n, group, d], after RoPE.
        k: float32 [heads, n, d], after RoPE.
        scale: factor on the logits.
        reading: [heads, n, group]; how strongly each query sees an error of one unit; all alike if None.
        stored: [heads, n]; how large the error of each key is; all alike if None.
    """
    heads, n, group, _ = q.shape
    exact = Exact.of(n)
    keys, values = (torch.zeros(heads, n, device=q.device) for _ in range(2))
    queries = torch.zeros(heads, n, group, device=q.device)
    positions = torch.arange(n, device=q.device)
    readers = ((n - exact.recent - positions).clamp_min(1) * group).float()
    for rows, logits, away in scores_of(q, k, scale, exact.sink + exact.recent):
        p = logits.softmax(-1)
        stop = p.shape[-1]
        p *= ((away >= exact.recent) & (positions[:stop] >= exact.sink))[:, None]
        p_squared = p.square()
        values[:, :stop] += p_squared.sum((1, 2))
        u = p.sub_(p_squared)
        keys[:, :stop] += (u if reading is None else u * reading[:, rows, :, None]).sum((1, 2))
        u /= readers[:stop]
        queries[:, rows] = (u if stored is None else u * stored[:, None, None, :stop]).sum(-1)
    return Sensitivity(keys / readers, queries, values / readers)


def key_weights(q: torch.Tensor, k: torch.Tensor, scale: float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """What errors of keys count in one request: :attr:`Sensitivity.keys` alone, at half the price or less.

    Of a long request every second, third ... query is looked at, :data:`READERS` at most.

    Args:
        q: float32 [heads, n, group, d], after RoPE.
        k: float32 [heads, n, d], after RoPE.
        scale: factor on the logits.
        sinks: [heads, group], sink logits; None for none.

    Returns:
        float32 [heads, n].
    """
    heads, n, group, _ = q.shape
    exact, positions = Exact.of(n), torch.arange(n, device=q.device)
    out = torch.zeros(heads, n, device=q.device)
    first = exact.sink + exact.recent
    stride = max(1, -(-(n - first) // READERS))
    for _, logits, away in scores_of(q, k, scale, first, stride):
        p = attention_of(logits, sinks)
        p *= ((away >= exact.recent) & (positions[: p.shape[-1]] >= exact.sink))[:, None]
        out[:, : p.shape[-1]] += p.sum((1, 2)) - p.square_().sum((1, 2))
    reading = torch.arange(first, n, stride, device=q.device)
    readers = len(reading) - torch.searchsorted(reading, positions + exact.recent)
    return out.clamp_min_(0) / (readers.clamp_min(1) * group)


def mixed(weights: Sequence[torch.Tensor], share: float, sink: int = SINK) -> list[torch.Tensor]:
    """``share`` of the weights and 1 - share of equal ones, both with mean 1 by head over all requests.

    Args:
        weights: [heads, n, ...] of every request.
        share: 0 to 1.
        sink: leading tokens that get none; at most an eighth of a request.
    """
    total = torch.stack([w.flatten(1).sum(1) for w in weights]).sum(0)
    count = sum(w[0].numel() for w in weights)
    out = []
    for w in weights:
        scaled = w * (count / total.clamp_min(1e-30)).view(-1, *[1] * (w.ndim - 1))
        both = share * scaled + (1 - share) if share else torch.ones_like(w)
        both[:, : min(sink, w.shape[1] // 8)] = 0
        out.append(both)
    return out


def attention_kl(
    q: torch.Tensor,
    k: torch.Tensor,
    coded: torch.Tensor,
    scale: float,
    queries: int = 128,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(p || p^) of attention where keys outside the 16-bit windows are ``coded``: mean over queries, [heads].

    Args:
        q: float32 [heads, n, group, d].
        k, coded: float32 [heads, n, d].
        scale: factor on the logits.
        queries: that are looked at, the last ones.
        sinks: [heads, group], sink logits, whose part of the attention counts too; None for none.
    """
    n, exact = k.shape[1], Exact.of(k.shape[1])
    first = max(n - queries, min(exact.sink + exact.recent, n - 1))
    total = torch.zeros(k.shape[0], device=q.device)
    positions = torch.arange(n, device=q.device)
    for (_, true, away), (_, seen, _) in zip(
        scores_of(q, k, scale, first), scores_of(q, coded, scale, first), strict=True
    ):
        read = ((away >= exact.recent) & (positions[: true.shape[-1]] >= exact.sink))[:, None]
        p, other = (with_sinks(x, sinks).log_softmax(-1) for x in (true, torch.where(read, seen, true)))
        total += (p.exp() * (p - other).nan_to_num_(0)).sum((1, 2, 3))
    return total / ((n - first) * q.shape[2])


def output_error(
    q: torch.Tensor,
    k: torch.Tensor,
    wrong: torch.Tensor,
    scale: float,
    reader: torch.Tensor,
    queries: int = 128,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Energy behind the output projection of value errors outside the 16-bit windows: mean over queries, [heads].

    Args:
        q, k, scale, queries, sinks: as of :func:`attention_kl`.
        wrong: float32 [heads, n, d], the errors of the values.
        reader: W_o W_o^T by kv head, [heads, d, d].
    """
    n, exact = k.shape[1], Exact.of(k.shape[1])
    first = max(n - queries, min(exact.sink + exact.recent, n - 1))
    total = torch.zeros(k.shape[0], device=q.device)
    positions = torch.arange(n, device=q.device)
    for _, true, away in scores_of(q, k, scale, first):
        stop = true.shape[-1]
        read = ((away >= exact.recent) & (positions[:stop] >= exact.sink))[:, None]
        moved = ((attention_of(true, sinks) * read).flatten(1, 2) @ wrong[:, :stop]).float()
        total += ((moved @ reader.float()) * moved).sum((1, 2))
    return total / ((n - first) * q.shape[2])
