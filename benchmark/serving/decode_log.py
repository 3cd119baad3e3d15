"""Speed of decoding as SGLang counts it itself: read off the server's log, free of what a client adds."""

from __future__ import annotations

import re
import statistics
from typing import NamedTuple

EVERY = 16
"""Steps between two lines of the log; servers that are measured get :data:`FLAGS`."""
FLAGS = ["--decode-log-interval", str(EVERY)]
_LINE = re.compile(
    r"Decode batch.*?#running-req: (\d+)(?:.*?accept len: ([\d.]+))?.*?gen throughput \(token/s\): ([\d.]+)"
)


class Speed(NamedTuple):
    """Of the steps with the most requests at once: how many, tokens per second, milliseconds per step, and tokens that
    a request gets by a step: 1 without speculation."""

    running: int
    tokens_per_s: float
    ms_per_step: float
    accepted: float = 1.0


def running_in(log: str) -> list[int]:
    """Requests at once, of every line about decoding."""
    return [int(running) for running, *_ in _LINE.findall(log)]


def steady(log: str) -> Speed:
    """Median speed while most requests ran; the first line about them also counts the time of their prompts.

    Raises:
        ValueError: the log has too few lines about decoding.
    """
    lines = [(int(running), float(accepted or 1), float(speed)) for running, accepted, speed in _LINE.findall(log)]
    most = max((running for running, *_ in lines), default=0)
    steps = [(accepted, speed) for running, accepted, speed in lines if running == most][1:]
    if len(steps) < 3:
        raise ValueError(f"{len(steps)} log lines about {most} requests at once; let them generate more tokens")
    speed = statistics.median(speed for _, speed in steps)
    took = statistics.median(1e3 * most * accepted / speed for accepted, speed in steps)
    return Speed(most, speed, took, statistics.fmean(accepted for accepted, _ in steps))
