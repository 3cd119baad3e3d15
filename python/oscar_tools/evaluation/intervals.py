"""Confidence intervals: 95%, two-sided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

Z = 1.959963984540054
RESAMPLES = 2000
CLUSTER_RESAMPLES = 400
"""Of statistics that look at every token again; the bounds move by a few percent of their width."""


@dataclass(frozen=True)
class Estimate:
    """A mean, or another statistic, with its interval."""

    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """As JSON values."""
        return asdict(self)


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


def clustered_bootstrap(
    clusters: Sequence[np.ndarray], statistic: Callable[[np.ndarray], float | np.floating]
) -> Estimate:
    """Percentile bootstrap of a statistic of all observations, drawing whole clusters: tokens of one document stay
    together, because they are alike.

    Args:
        clusters: observations of every cluster, one-dimensional.
        statistic: of the observations of all clusters together.

    Raises:
        ValueError: no observations.
    """
    whole = np.concatenate([np.asarray(x, dtype=np.float64) for x in clusters]) if clusters else np.empty(0)
    if whole.size == 0:
        raise ValueError("a statistic needs observations")
    drawn = np.random.default_rng(0).integers(0, len(clusters), (CLUSTER_RESAMPLES, len(clusters)))
    found = [float(statistic(np.concatenate([clusters[i] for i in row]))) for row in drawn]
    low, high = np.percentile(found, [2.5, 97.5])
    return Estimate(float(statistic(whole)), float(low), float(high))


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
