"""KL divergence of next-token distributions of which a server tells the most likely tokens only.

A server says the log probabilities of its K most likely tokens. Whatever two servers p and q are compared, putting
tokens together never raises the divergence. So for the set S of tokens that both told, and all others as one token,

    KL(p || q) >= sum over S of p log(p / q) + P log(P / Q),   P = 1 - p(S), Q = 1 - q(S).

A token that p told and q did not has at most the least probability m that q told. With U the set of these,

    KL(p || q) >= sum over S of p log(p / q) + sum over U of p log(p / m) + P' log(P' / Q),   P' = 1 - p(S) - p(U).

What is reported is the larger of the two: a lower bound, tight where S holds nearly all of p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SMALLEST = 1e-7
"""A remainder below is rounding: log probabilities come as float32."""


@dataclass(frozen=True)
class TopTokens:
    """What a server says of the tokens behind a prefix.

    Attributes:
        ids: int32 [tokens, K], most likely tokens at each place, the most likely first.
        logprobs: float32 [tokens, K], natural logarithms of their probabilities.
        read: float32 [tokens], log probability of the token that the text has there.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    read: np.ndarray


def kl_lower_bound(p: TopTokens, q: TopTokens, text: np.ndarray) -> np.ndarray:
    """Lower bound of KL(p || q) in nats: float64 [tokens].

    Args:
        p, q: of the same text at the same places.
        text: int [tokens], the token that the text has at each place; both told its probability.

    Raises:
        ValueError: of different numbers of tokens.
    """
    if not len(p.ids) == len(q.ids) == len(text):
        raise ValueError(f"cannot compare {len(p.ids)} with {len(q.ids)} tokens")
    return np.array([_one(p, q, int(text[i]), i) for i in range(len(text))])


def _one(p: TopTokens, q: TopTokens, read: int, i: int) -> float:
    first = dict(zip(p.ids[i].tolist(), p.logprobs[i].tolist(), strict=True)) | {read: float(p.read[i])}
    second = dict(zip(q.ids[i].tolist(), q.logprobs[i].tolist(), strict=True)) | {read: float(q.read[i])}
    both = [token for token in first if token in second]
    log_p, log_q = np.array([first[t] for t in both]), np.array([second[t] for t in both])
    shared = float((np.exp(log_p) * (log_p - log_q)).sum())
    rest_p, rest_q = 1 - float(np.exp(log_p).sum()), max(1 - float(np.exp(log_q).sum()), SMALLEST)
    together = shared + _term(rest_p, rest_q)
    missing = np.array([first[t] for t in first if t not in second])
    mass = float(np.exp(missing).sum())
    apart = shared + float((np.exp(missing) * (missing - float(q.logprobs[i, -1]))).sum())
    return max(0.0, together, apart + _term(rest_p - mass, rest_q))


def _term(p: float, q: float) -> float:
    return p * np.log(p / q) if p > SMALLEST else 0.0


def covered(p: TopTokens) -> np.ndarray:
    """Probability that the told tokens hold together: float64 [tokens]."""
    return np.minimum(np.exp(p.logprobs.astype(np.float64)).sum(-1), 1.0)


def same_choice(p: TopTokens, q: TopTokens) -> np.ndarray:
    """Whether the most likely token is the same: bool [tokens]."""
    return p.ids[:, 0] == q.ids[:, 0]
