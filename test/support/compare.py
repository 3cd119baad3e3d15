"""Comparing a server's greedy answers with another: equal, up to near-ties that log probabilities show to be such.

Where the other is stock SGLang with nothing to be tested of it, it need not answer: :func:`assert_follows` lets it read
the answers, in one pass each, and compares every token; :func:`assert_same` compares two answers up to where they part.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
"""Extra fields of a /generate request whose answer is to be compared."""


@dataclass
class Difference:
    """Where two greedy outputs part: token index, distance of log probabilities before it, and the choice there."""

    index: int
    drift: float
    gap: float


@dataclass
class Step:
    """A server's log probability of a token that another chose, and how much more its own choice has there."""

    logprob: float
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


def numbers(answer: dict[str, Any], request: int) -> list[float]:
    """Log probabilities of an answer's tokens; NaN, which SGLang hands out as null, fails."""
    said = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    known = [logprob is not None for logprob in said]
    assert all(known), f"request {request}: from token {known.index(False)} on probabilities are not numbers"
    return said


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
            numbers(one, number)
        found = first_difference(x, y)
        assert largest_drift(x, y) <= drift, f"request {number}: log probabilities drift by {largest_drift(x, y):.4f}"
        if found is not None:
            assert found.gap <= near_tie, f"request {number} differs at {found}"
        usual += before_a_flip(len(x["output_ids"]))
        compared += len(x["output_ids"]) if found is None else found.index
    assert len(a) < 8 or compared * 2 >= usual, f"only {compared} tokens agree before a near-tie, usually {usual:.0f}"


class Reads(Protocol):
    """A server that is given token ids."""

    def generate(self, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        """The reply of /generate."""


def read(stock: Reads, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]]) -> list[list[Step]]:
    """What a server says of every token of answers that another has given, in one pass over prompt and answer each.

    Raises:
        AssertionError: a probability is not a number.
    """

    def one(number: int) -> list[Step]:
        prompt, ids = prompts[number], answers[number]["output_ids"]
        meta = stock.generate([*prompt, *ids], 1, **LOGPROBS | {"logprob_start_len": len(prompt) - 1})["meta_info"]
        said = list(zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True))[-len(ids) :]
        # SGLang calls the last token of a vocabulary 0 here; the probability is that token's.
        assert all(entry[1] in (asked, 0) for (entry, _), asked in zip(said, ids, strict=True))
        steps = []
        for index, (entry, top) in enumerate(said):
            assert entry[0] is not None, f"request {number}: stock's probability of token {index} is not a number"
            steps.append(Step(entry[0], top[0][0] - entry[0]))
        return steps

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(answers))))


def assert_follows(
    stock: Reads, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]], near_tie: float, drift: float
) -> None:
    """Stock SGLang would have given these answers: at every token it has the same log probability and the same choice.

    Args:
        stock: a server that computes what it is given anew.
        prompts, answers: token ids that were asked of the tested server, and its answers of /generate.
        near_tie: by how much, in log probability, stock may prefer another token.
        drift: largest difference in log probability allowed.
    """
    for number, (answer, steps) in enumerate(zip(answers, read(stock, prompts, answers), strict=True)):
        for index, (logprob, step) in enumerate(zip(numbers(answer, number), steps, strict=True)):
            off = abs(logprob - step.logprob)
            assert off <= drift, f"request {number}, token {index}: log probabilities drift by {off:.4f}"
            assert step.gap <= near_tie, f"request {number}, token {index}: another is better by {step.gap:.4f}"
