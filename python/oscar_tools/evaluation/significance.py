"""Means over seeds and paired comparisons of two methods on the same questions."""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap, permutation_test

Scores = Mapping[str, float]
"""Question -> score in [0, 1]."""


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; the latter None for a single value."""
    return plain.fmean(values), plain.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class PairedTest:
    """Difference of two methods over questions that both answered, scores averaged over seeds first.

    Attributes:
        questions: number of them.
        difference: mean of (other - reference).
        low, high: 95% bootstrap interval of the difference; None where all differences are equal.
        p_value: two-sided sign-flip permutation test; 1 where nothing differs.
    """

    questions: int
    difference: float
    low: float | None
    high: float | None
    p_value: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def paired_test(reference: Sequence[Scores], other: Sequence[Scores], seed: int = 0) -> PairedTest:
    """Compare two methods question by question.

    Args:
        reference: scores of every seed of the first method.
        other: of the second one; the numbers of seeds may differ.
        seed: of the resampling.

    Raises:
        ValueError: no question was answered by both.
    """
    first, second = _per_question(reference), _per_question(other)
    common = sorted(set(first) & set(second))
    if not common:
        raise ValueError("the two methods have no question in common")
    differences = np.array([second[question] - first[question] for question in common])
    mean = float(differences.mean())
    if len(common) < 2 or bool(np.all(differences == differences[0])):
        all_zero = math.isclose(mean, 0.0, abs_tol=1e-12)
        return PairedTest(
            len(common), mean, None, None, 1.0 if all_zero or len(common) < 2 else 0.5 ** (len(common) - 1)
        )
    zeros = np.zeros_like(differences)
    rng = np.random.default_rng(seed)
    tested = permutation_test(
        (differences, zeros),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=rng,
    )
    interval = bootstrap((differences,), np.mean, method="percentile", rng=rng).confidence_interval
    return PairedTest(len(common), mean, float(interval.low), float(interval.high), float(tested.pvalue))


def mcnemar(reference: Mapping[str, bool], other: Mapping[str, bool]) -> float:
    """Exact two-sided McNemar test of two methods on questions that are right or wrong.

    Args:
        reference, other: question -> whether it was answered rightly.

    Returns:
        the p-value over questions that both answered; 1 where they agree on all.
    """
    common = set(reference) & set(other)
    lost = sum(reference[question] and not other[question] for question in common)
    won = sum(other[question] and not reference[question] for question in common)
    return float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0


def _per_question(runs: Sequence[Scores]) -> dict[str, float]:
    collected: dict[str, list[float]] = {}
    for run in runs:
        for question, score in run.items():
            collected.setdefault(question, []).append(score)
    return {question: plain.fmean(scores) for question, scores in collected.items()}
