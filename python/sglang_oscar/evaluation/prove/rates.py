"""Shares of right answers, beside those of BF16, and how many answers were cut off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_oscar.evaluation.intervals import wilson
from sglang_oscar.evaluation.significance import mcnemar, paired_test

LENGTH = "length"
"""``finish_reason`` of an answer that reached its limit of tokens."""
WARN_ABOVE = 0.01
"""Share of answers cut off from which on the page warns: then the limit is measured, too."""


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


def counts(asked: int, finishes: Iterable[str]) -> dict[str, int]:
    """How many questions were asked, answered, and cut off at their limit.

    Args:
        asked: questions.
        finishes: ``finish_reason`` of every answer.
    """
    known = list(finishes)
    return {"asked": asked, "answered": len(known), "cut_off": known.count(LENGTH)}


def cut_share(found: Mapping[str, int]) -> float:
    """The share of answers that were cut off, of :func:`counts`."""
    return found["cut_off"] / found["answered"] if found["answered"] else 0.0


def cut_warning(found: Mapping[str, int]) -> str | None:
    """What must be said of answers that were cut off; None up to :data:`WARN_ABOVE`."""
    if cut_share(found) <= WARN_ABOVE:
        return None
    return f"{found['cut_off']} of {found['answered']} answers were cut off at their limit of tokens"
