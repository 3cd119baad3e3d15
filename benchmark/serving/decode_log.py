"""Speed of decoding as SGLang counts it itself: read off the server's log, free of what a client adds."""

from __future__ import annotations

import re
import statistics
from typing import NamedTuple

EVERY = 16
"""Steps between two lines of the log; servers that are measured get :data:`FLAGS`."""
FLAGS = ["--decode-log-interval", str(EVERY)]
_LINE = re.compile(r"Decode batch.*#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)")


class Speed(NamedTuple):
    """Of the steps with the most requests at once: how many, tokens per second, milliseconds per step."""

    running: int
    tokens_per_s: float
    ms_per_step: float


def steady(log: str) -> Speed:
    """Median speed while most requests ran; the first line about them also counts the time of their prompts.

    Raises:
        ValueError: the log has too few lines about decoding.
    """
    lines = [(int(running), float(speed)) for running, speed in _LINE.findall(log)]
    most = max((running for running, _ in lines), default=0)
    speeds = [speed for running, speed in lines if running == most][1:]
    if len(speeds) < 3:
        raise ValueError(f"{len(speeds)} log lines about {most} requests at once; let them generate more tokens")
    speed = statistics.median(speeds)
    return Speed(most, speed, 1e3 * most / speed)
