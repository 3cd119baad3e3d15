"""What a stream of pieces says of a user while others arrive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "serving"))

from bench_arrivals import Answer


@pytest.mark.parametrize(
    ("pieces", "rate", "wait"),
    [
        ([(1, 5), (11, 10), (14, 20), (30, 90)], 1.5, 6),
        ([(1, 5), (30, 90)], 0, 10),
        ([(11, 10)], 1, 9),
    ],
    ids=["some come", "none comes", "the first comes"],
)
def test_tokens_and_the_longest_wait_between_two_times(
    pieces: list[tuple[float, int]], rate: float, wait: float
) -> None:
    assert Answer(pieces).between(10, 20) == {"tokens_per_s": rate, "longest_wait_s": wait}
