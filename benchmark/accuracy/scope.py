"""What a run measures: sizes, data, and which methods in which regime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from accuracy_figures import chart_names

from accuracy.methods import combined
from accuracy.methods.base import Method
from accuracy.models import REGIMES

CALIBRATION_TEXT = (0, 32_000)
"""First token and end, within the held-out modules, of calibration text."""


@dataclass(frozen=True)
class Split:
    """What methods are measured on.

    Attributes:
        seed: of documents.
        text: first token and end, within the held-out modules, of the text that perplexity is measured on.
    """

    seed: int
    text: tuple[int, int | None]


SPLITS = {"report": Split(31, (64_000, None)), "choice": Split(5, (32_000, 64_000))}
"""The recipe ``plus`` was chosen on the second; the report is about the first."""

LAYER_CONTEXTS, LONG_CONTEXTS = 8, 4
"""Contexts of what is measured layer by layer, and of it at several lengths."""

FIGURES = ("naive INT2 g128", "QuaRot-INT2 g128", "OSCAR g128, no rotation", "OSCAR g128", "plus g128")
"""Methods drawn in the figures, as in the paper: naive, Hadamard, clipping alone, OSCAR; and ``plus``."""

EVERYWHERE = ("methods",)
ABLATED = dict.fromkeys(("plus", "bits", "codebooks", "factors", "order", "targets"), (REGIMES[0], REGIMES[2]))
ONCE = {"windows": REGIMES[1:2], "clip": REGIMES[1:2], "calibration": REGIMES[1:2]}


REAL = (*EVERYWHERE, "focus", "bits", "broad bits", "codebooks", "broad codebooks", "domains")
"""Tables of a real model, in this order: every method, the parts of the recipe that was made on one, bits of keys and
values, codes of pairs of channels, and calibration on one kind of text. Broad ones are calibrated on all kinds."""

EVERY_LENGTH = (*EVERYWHERE, "bits", "broad bits", "codebooks", "broad codebooks", "combinations")
"""Tables whose methods are asked about documents of every length, not of the first alone."""

PUBLISHED = (
    "FP8", "FP8, calibrated scale", "NVFP4", "naive INT2 g128", "naive INT4 g128", "KIVI-2", "Kitty",
    "QuaRot-INT2 g128", "QuaRot-INT2 g64", "Saw-INT4", "RotateKV g128", "TurboQuant K3V3", "OScaR g32",
    "KVarN K2V2", "KVarN K4V2", "Block-GTQ K2V2, windows", "NOVA-KV", "OSCAR g128", "OSCAR g64",
)  # fmt: skip
PLUS, FOCUS = "plus g128", "focus g128, served form"
SERVED = (
    PLUS, "plus g64", f"{PLUS}, --bits 2.5", f"{PLUS}, --bits 3.0", FOCUS, "focus g64, served form",
    *(f"{FOCUS}, --bits {goal}" for goal in ("2.5", "2.75", "k3v2", "3.0", "3.5")),
    *(f"{FOCUS}, --bits {goal}, by the model" for goal in ("2.5", "3.0")),
)  # fmt: skip
FOURS = f"{FOCUS}, keys as fitted fours"
CODEBOOKS = (
    FOURS, f"{FOURS}, by relative error", f"{FOURS}, values as normal fours",
    f"{FOCUS}, 16 points per pair, of calibration", "NOVA-KV, every position",
)  # fmt: skip
COMBINATIONS = tuple(method().name for method in combined.METHODS)
SETS = {
    "real": ("BF16", *SERVED, *CODEBOOKS, *PUBLISHED),
    "combinations": (
        "BF16",
        FOCUS,
        *COMBINATIONS[:9],
        "NOVA-KV",
        FOURS,
        *(f"{FOCUS}, --bits {goal}" for goal in ("2.5", "k3v2")),
        *COMBINATIONS[9:],
    ),
    "chart": tuple(name for recipe in (FOCUS, PLUS) for name in chart_names(recipe).values()),
}
"""Named sets of methods: what a real model of some size is measured with, codes of keys and values put together, and
every width of keys with every width of values."""


FAR = (
    "BF16", "FP8", "FP8, calibrated scale", "NVFP4", "KIVI-2", "Kitty", "QuaRot-INT2 g128", "Saw-INT4", "KVarN K4V2",
    "NOVA-KV", "NOVA-KV, every position", "OSCAR g128", "OSCAR g64", PLUS, f"{PLUS}, --bits 2.5", FOCUS,
    "focus g64, served form", *(f"{FOCUS}, --bits {goal}" for goal in ("2.5", "k3v2", "3.0")), FOURS,
    *COMBINATIONS[:9],
)  # fmt: skip
NEAR = 4096
"""Of more tokens than this only those of the list are asked: such questions cost as much as all else together."""


def asked(method: Method, length: int) -> bool:
    """Whether a method is asked about documents of ``length`` tokens, not only about the shortest."""
    return method.table in EVERY_LENGTH and (length <= NEAR or method.name in FAR)


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        contexts, context, tail: language: sequences, their tokens, decoded tokens of each. The first
            :data:`LAYER_CONTEXTS` are measured layer by layer.
        lengths: documents of retrieval, in tokens, those that a model's context has no room for left out; ablations
            are asked about the first only.
        documents, questions: of retrieval, per length.
        long_contexts: lengths at which the attention KL of :data:`FIGURES` is measured.
        tables: of methods; others are left out.
        real_tables: the same, for models that are measured as they are, without regimes.
        kind_contexts, kind_context, kind_tail: of each further kind of text of a real model.
        regimes: names; others are left out.
        batch_tokens: retrieval, at a time.
    """

    contexts: int = 48
    context: int = 2048
    tail: int = 512
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    documents: int = 12
    questions: int = 4
    long_contexts: tuple[int, ...] = (1024, 2048, 4096)
    tables: tuple[str, ...] = (*EVERYWHERE, *ABLATED, *ONCE)
    regimes: tuple[str, ...] = tuple(regime.name for regime in REGIMES)
    batch_tokens: int = 65536
    real_tables: tuple[str, ...] = REAL
    kind_contexts: int = 12
    kind_context: int = 1536
    kind_tail: int = 256


TWO = (REGIMES[0].name, REGIMES[2].name)
SIZES = {
    "full": Size(),
    "reduced": Size(6, 1024, 256, (1024,), 3, 4, (), EVERYWHERE, TWO, 8192, EVERYWHERE, 2, 768, 128),
    "long": Size(24, 1536, 256, (1024,), 12, 4, (), EVERYWHERE, batch_tokens=16384),
    "tiny": Size(2, 640, 32, (700,), 1, 2, (640,), EVERYWHERE, TWO, 4096, EVERYWHERE, 1, 512, 16),
}


def wanted(method: Method, regime: str, size: Size, real: bool = False) -> bool:
    """Whether a method is measured in a regime; a ``real`` model has none but "as trained"."""
    if real:
        return method.table in size.real_tables
    if method.table not in size.tables:
        return False
    regimes = REGIMES if method.table in EVERYWHERE else (ABLATED | ONCE).get(method.table, ())
    return regime in {r.name for r in regimes}


def text_windows(tokens: np.ndarray, text: tuple[int, int | None], count: int, length: int) -> torch.Tensor:
    """Windows of a stretch of text, evenly spaced: int64 [count, length]. Where there is less text, of all there is.

    Raises:
        ValueError: fewer tokens than one window needs.
    """
    usable = tokens[slice(*text)]
    if len(usable) < length:
        usable = tokens
    if len(usable) < length:
        raise ValueError(f"{len(tokens)} tokens of held-out text do not make a context of {length}")
    starts = np.linspace(0, len(usable) - length, count).astype(int)
    return torch.stack([torch.from_numpy(usable[s : s + length].astype(np.int64)) for s in starts])
