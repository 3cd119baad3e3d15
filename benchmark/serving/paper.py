"""Serving experiments of the OSCAR paper (arXiv 2605.17757), and its figures for them, on one H100 of 80 GB."""

from __future__ import annotations

from dataclasses import dataclass

COLD, HIT, OFF = "cold", "hit", "off"
"""The prefix cache before a measurement: empty; holding every prompt; switched off."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: how many, tokens of a prompt and of an answer, and the prefix cache before."""

    requests: int
    prompt: int
    answer: int
    cache: str = COLD


EXPERIMENTS: dict[str, list[Load]] = {
    "table9": [Load(32, 8192, 1024)],
    "figure4": [Load(1, prompt, 1024, HIT) for prompt in (30_000, 60_000, 100_000)]
    + [Load(requests, 100_000, 1024, HIT) for requests in (8, 32)],
    "figure5": [Load(1 << power, 100_000, 1024) for power in range(9)],
    "figure6": [Load(requests, 100_000, 1024, cache) for cache in (OFF, COLD, HIT) for requests in (1, 8, 16, 32)],
}
"""What ``bench_paper.py`` sends; table 8 is ``bench_step.py``."""

STEPS = (1, 8, 16, 32, 64, 128)
"""Requests at once in table 8."""
STEP_CONTEXT = 8192
"""Tokens of a request there, which the paper leaves out: its BF16 attention of 32 requests takes as long as an H100
needs to read eight or nine thousand tokens of each."""

TABLE8: dict[str, dict[int, dict[str, float]]] = {
    "BF16": {
        1: {"matrix products": 5.6, "attention": 3.8, "other": 0.6, "ms": 9.9},
        8: {"matrix products": 5.6, "attention": 4.4, "other": 0.6, "ms": 10.7},
        16: {"matrix products": 5.7, "attention": 8.9, "other": 0.7, "ms": 15.2},
        32: {"matrix products": 5.7, "attention": 17.0, "other": 0.7, "ms": 23.4},
    },
    "OSCAR": {
        1: {"matrix products": 5.6, "attention": 1.3, "store": 0.5, "other": 0.6, "ms": 8.0},
        8: {"matrix products": 5.7, "attention": 3.0, "store": 0.5, "other": 0.8, "ms": 9.9},
        16: {"matrix products": 5.7, "attention": 4.6, "store": 0.5, "other": 0.8, "ms": 11.6},
        32: {"matrix products": 5.7, "attention": 8.5, "store": 0.5, "other": 0.8, "ms": 15.5},
        64: {"matrix products": 5.8, "attention": 16.2, "store": 0.5, "other": 0.9, "ms": 23.4},
        128: {"matrix products": 5.9, "attention": 31.9, "store": 0.6, "other": 1.0, "ms": 39.3},
    },
}
"""Milliseconds of a step of Qwen3-8B by cache, requests and kind; BF16 has no room for more than 32 requests."""

TABLE9: dict[str, dict[str, tuple[float, float]]] = {
    "qwen3-4b": {
        "BF16": (41.1, 1187.9),
        "naive INT2": (66.4, 1797.4),
        "QuaRot-INT2": (66.3, 1795.8),
        "Saw-INT4": (50.6, 1444.1),
        "OSCAR": (63.3, 1723.9),
    },
    "qwen3-8b": {
        "BF16": (35.8, 999.9),
        "naive INT2": (54.2, 1415.1),
        "QuaRot-INT2": (54.1, 1411.9),
        "Saw-INT4": (43.0, 1183.2),
        "OSCAR": (52.5, 1374.0),
    },
}
"""Tokens per second of a user and of the GPU, by shape and cache."""

FIGURE4: dict[str, dict[tuple[int, int], float]] = {
    "qwen3-4b": {(1, 30_000): 1.98, (1, 60_000): 2.52, (1, 100_000): 3.08},
    "glm-4.7": {(1, 100_000): 2.83, (32, 100_000): 7.83},
}
"""Speed of OSCAR over BF16 by shape, requests and tokens of a prompt, as far as its text has numbers; GLM-4.7 in FP8 on
eight GPUs."""
