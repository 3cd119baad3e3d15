"""As many requests as fit: tokens of whole pages, or rows for requests, whichever ends first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from bench_throughput import fitting
from room import Room


def test_as_many_requests_as_fit() -> None:
    assert fitting(Room(tokens=1000, requests=16), 300) == 3
    assert fitting(Room(tokens=1000, requests=2), 300) == 2
    assert fitting(Room(tokens=1000, requests=16, page=64), 321) == 2
    assert fitting(Room(tokens=100, requests=16), 300) == 0
