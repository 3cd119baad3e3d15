"""Confidence intervals hold what they should."""

from __future__ import annotations

import numpy as np
import pytest

from oscar_tools.evaluation.intervals import bootstrap, wilson


def test_wilson_interval() -> None:
    """8 of 10: 0.4902 to 0.9433; nothing right in 10 still leaves 0.2775 possible."""
    found = wilson(8, 10)
    assert (round(found.low, 4), round(found.high, 4)) == (0.4902, 0.9433)
    assert round(wilson(0, 10).high, 4) == 0.2775
    assert wilson(10, 10).high == pytest.approx(1.0)
    with pytest.raises(ValueError, match="trials"):
        wilson(3, 2)


def test_bootstrap_covers_the_mean() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        x = rng.normal(3.0, 1.0, 40)
        found = bootstrap(x)
        assert found.low <= found.mean <= found.high
        hits += found.low <= 3.0 <= found.high
    assert 178 <= hits <= 199
    with pytest.raises(ValueError, match="observations"):
        bootstrap([])
