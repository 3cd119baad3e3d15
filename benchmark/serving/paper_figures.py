"""Serving figures that the OSCAR paper (arXiv 2605.17757, section 5.4) states, as data.

Of figures 4 to 6 the paper's text states what is here; the rest of them are pictures. Models are named by their shape
(``shapes.py``).
"""

from __future__ import annotations

from typing import NamedTuple

GPU = "H100 80 GB"
"""What Qwen3-4B and 8B were served on, one of them; GLM-4.7-FP8 on eight."""


class Step(NamedTuple):
    """Milliseconds of one step of decoding, by kind of kernel. Storing and quantizing is a kind of OSCAR's only; in
    BF16 it is not told apart. No idle time is stated: the parts add up to the total."""

    products: float
    attention: float
    store: float | None
    other: float
    total: float


class Throughput(NamedTuple):
    """Tokens per second of a user (U) and of a GPU (G)."""

    U: float
    G: float


TABLE8: dict[str, dict[str, dict[int, Step | None]]] = {
    "qwen3-8b": {
        "BF16": {
            1: Step(5.6, 3.8, None, 0.6, 9.9),
            8: Step(5.6, 4.4, None, 0.6, 10.7),
            16: Step(5.7, 8.9, None, 0.7, 15.2),
            32: Step(5.7, 17.0, None, 0.7, 23.4),
            64: None,
            128: None,
        },
        "OSCAR": {
            1: Step(5.6, 1.3, 0.5, 0.6, 8.0),
            8: Step(5.7, 3.0, 0.5, 0.8, 9.9),
            16: Step(5.7, 4.6, 0.5, 0.8, 11.6),
            32: Step(5.7, 8.5, 0.5, 0.8, 15.5),
            64: Step(5.8, 16.2, 0.5, 0.9, 23.4),
            128: Step(5.9, 31.9, 0.6, 1.0, 39.3),
        },
    }
}
"""By shape, method and requests at once; None is a batch that did not fit."""
TABLE9: dict[str, dict[str, Throughput]] = {
    "qwen3-4b": {
        "BF16": Throughput(41.1, 1187.9),
        "naive INT2": Throughput(66.4, 1797.4),
        "QuaRot-INT2": Throughput(66.3, 1795.8),
        "Saw-INT4": Throughput(50.6, 1444.1),
        "OSCAR": Throughput(63.3, 1723.9),
    },
    "qwen3-8b": {
        "BF16": Throughput(35.8, 999.9),
        "naive INT2": Throughput(54.2, 1415.1),
        "QuaRot-INT2": Throughput(54.1, 1411.9),
        "Saw-INT4": Throughput(43.0, 1183.2),
        "OSCAR": Throughput(52.5, 1374.0),
    },
}
"""By shape and method: 32 requests of 8,192 tokens with answers of 1,024."""
FIGURE4_CONTEXT: dict[str, dict[int, float]] = {"qwen3-4b": {30_000: 1.98, 60_000: 2.52, 100_000: 3.08}}
"""OSCAR's speed of decoding over BF16's by shape and tokens of context: one request, everything a prefix hit."""
FIGURE4_BATCH: dict[str, dict[int, float]] = {"glm-4.7": {1: 2.83, 32: 7.83}}
"""OSCAR's throughput over BF16's by shape and requests of 100,000 tokens; GLM-4.7-FP8 on eight GPUs."""
FIGURE5_REQUESTS = 256
"""Requests of 100,000 tokens at once up to which OSCAR's throughput goes on growing on one GPU."""
