"""Comparing greedy outputs of two servers: equal, up to near-ties that log probabilities show to be such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
"""Extra fields of a /generate request whose answer is to be compared."""


@dataclass
class Difference:
    """Where two greedy outputs part: token index, distance of log probabilities before it, and the choice there."""

    index: int
    drift: float
    gap: float


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> Difference | None:
    """First token at which two /generate answers differ; None if they are the same.

    ``drift`` is the largest difference of log probabilities of the common tokens, ``gap`` the distance, in answer
    ``a``, between the best token and the second best where they part: a near-tie has a gap within the drift.
    """
    ids_a, ids_b = a["output_ids"], b["output_ids"]
    assert len(ids_a) == len(ids_b)
    logprobs_a = [entry[0] for entry in a["meta_info"]["output_token_logprobs"]]
    logprobs_b = [entry[0] for entry in b["meta_info"]["output_token_logprobs"]]
    index = next((i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=True)) if x != y), None)
    if index is None:
        return None
    drift = max((abs(x - y) for x, y in zip(logprobs_a[:index], logprobs_b[:index], strict=True)), default=0.0)
    top = [entry[0] for entry in a["meta_info"]["output_top_logprobs"][index]]
    return Difference(index, drift, top[0] - top[1])


def largest_drift(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of log probabilities over the common beginning of two answers."""
    pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
    worst = 0.0
    for x, y in pairs:
        if x[1] != y[1]:
            break
        worst = max(worst, abs(x[0] - y[0]))
    return worst


FLIPS = 1 / 25
"""Of the choices of a random model, those that BF16 noise flips."""


def before_a_flip(tokens: int) -> float:
    """Tokens of an answer before the first flipped choice, on average: 16 of 24, 24 of 70."""
    return (1 - (1 - FLIPS) ** tokens) / FLIPS


def assert_same(a: list[dict[str, Any]], b: list[dict[str, Any]], near_tie: float, drift: float) -> None:
    """Answers agree token by token, except after a choice between two tokens closer than ``near_tie``.

    Tokens after such a choice follow different texts and cannot be compared. Of eight answers or more, half of the
    tokens that noise usually leaves must have been compared; a fault leaves next to none. NaN, which SGLang hands out
    as null, is no tie.

    Args:
        a, b: answers of /generate to the same requests.
        near_tie: largest gap in log probability that arithmetic may flip.
        drift: largest difference in log probability allowed on common tokens.
    """
    compared, usual = 0, 0.0
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        for one in (x, y):
            known = [entry[0] is not None for entry in one["meta_info"]["output_token_logprobs"]]
            assert all(known), f"request {number}: from token {known.index(False)} on probabilities are not numbers"
        found = first_difference(x, y)
        assert largest_drift(x, y) <= drift, f"request {number}: log probabilities drift by {largest_drift(x, y):.4f}"
        if found is not None:
            assert found.gap <= near_tie, f"request {number} differs at {found}"
        usual += before_a_flip(len(x["output_ids"]))
        compared += len(x["output_ids"]) if found is None else found.index
    assert len(a) < 8 or compared * 2 >= usual, f"only {compared} tokens agree before a near-tie, usually {usual:.0f}"
