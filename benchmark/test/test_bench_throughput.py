"""As many requests as fit: tokens of whole pages, or rows for requests, whichever ends first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from room import Room


def test_as_many_requests_as_fit() -> None:
    assert Room(tokens=1000, requests=16).fitting(300) == 3
    assert Room(tokens=1000, requests=2).fitting(300) == 2
    assert Room(tokens=1000, requests=16, page=64).fitting(321) == 2
    assert Room(tokens=100, requests=16).fitting(300) == 0
