"""What the serving benchmarks read off a server's log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))
from decode_log import steady


def line(running: int, speed: float, accepted: float | None = None) -> str:
    usage = "#token: 789504, token usage: 0.17, "
    usage += f"accept len: {accepted:.2f}, accept rate: 0.50, cuda graph: True" if accepted else "cuda graph: True"
    return (
        f"[2026-01-01] Decode batch, #running-req: {running}, {usage}, gen throughput (token/s): {speed}, #queue-req: 0"
    )


def test_speed_is_that_of_the_largest_batch_without_its_first_line() -> None:
    log = "\n".join(
        ["Prefill batch, #running-req: 9", line(3, 999.0), line(4, 1.0), *(line(4, x) for x in (80, 90, 70))]
    )
    assert steady(log) == (4, 80.0, 50.0, 1.0)


def test_a_step_of_verification_gives_several_tokens() -> None:
    log = "\n".join(line(2, speed, accepted) for speed, accepted in ((9, 1.0), (100, 2.0), (150, 3.0), (200, 4.0)))
    assert steady(log) == (2, 150.0, 40.0, 3.0)


def test_too_little_text_is_no_result() -> None:
    with pytest.raises(ValueError, match="2 log lines about 4 requests"):
        steady("\n".join(line(4, x) for x in (1.0, 80.0, 90.0)))
