"""Confidence intervals: 95%, two-sided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float] | np.ndarray) -> Estimate:
    """Percentile bootstrap of a mean of independent observations.

    Args:
        values: observations.

    Raises:
        ValueError: no observations.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        raise ValueError("a mean needs observations")
    drawn = np.random.default_rng(0).integers(0, x.size, (RESAMPLES, x.size))
    means = x[drawn].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(x.mean()), float(low), float(high))


def wilson(successes: int, trials: int) -> Estimate:
    """Wilson score interval of a proportion (Wilson 1927).

    Raises:
        ValueError: no trials, or successes outside 0..trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes {successes} <= trials {trials} and a trial")
    p = successes / trials
    middle = (p + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * (p * (1 - p) / trials + Z**2 / (4 * trials**2)) ** 0.5
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))
