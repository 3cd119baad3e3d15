"""Shares of right answers, beside those of BF16, and how many answers were cut off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oscar_tools.evaluation.answers import TOLERATED, Answers
from oscar_tools.evaluation.intervals import wilson
from oscar_tools.evaluation.significance import mcnemar, paired_test

LENGTH = "length"
"""``finish_reason`` of an answer that reached its limit of tokens."""


def rate(right: Mapping[str, bool], base: Mapping[str, bool] | None, units: Iterable[str]) -> dict[str, Any]:
    """The share of right answers.

    Args:
        right: unit -> whether this cache was right.
        base: the same of BF16; None for BF16 itself.
        units: which of ``right`` count, one at least.

    Returns:
        ``questions``, ``right`` (Wilson's interval) and, beside BF16, ``p_value`` (McNemar) and ``difference`` (paired
        bootstrap) over questions that both answered; None where there are none.
    """
    chosen = {unit: right[unit] for unit in units}
    found: dict[str, Any] = {
        "questions": len(chosen),
        "right": wilson(sum(chosen.values()), len(chosen)).to_json(),
    }
    if base is not None:
        pair = {unit: base[unit] for unit in chosen if unit in base}
        found["p_value"] = mcnemar(pair, chosen)
        tested = paired_test([pair], [chosen]).to_json() if pair else None
        found["difference"] = tested and {name: tested[name] for name in ("difference", "low", "high")}
    return found


def counts(asked: int, answers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many questions were asked, answered and cut off, as :class:`evaluation.answers.Answers` counts them.

    Args:
        asked: questions.
        answers: what came back, with ``finish`` and ``text``.
    """
    known = list(answers)
    cut = sum(answer["finish"] == LENGTH for answer in known)
    ended = sum(answer["finish"] != LENGTH and bool(answer["text"].strip()) for answer in known)
    return Answers(asked, ended, cut).to_json()


def cut_share(found: Mapping[str, int]) -> float:
    """The share of questions whose answer was cut off, of :func:`counts`."""
    return found["cut_off"] / found["asked"] if found["asked"] else 0.0


def cut_warning(found: Mapping[str, int]) -> str | None:
    """What must be said of answers that were cut off; None where next to none was: then the limit is measured, too."""
    if cut_share(found) <= TOLERATED:
        return None
    return f"{found['cut_off']} of {found['asked']} answers were cut off at their limit of tokens"
