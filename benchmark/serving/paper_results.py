"""Results of ``bench_paper.py``, read for a report: rows by experiment, load and cache, and ratios of one run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper_loads import EXPERIMENTS, HIT, Load
from shapes import SHAPES

Row = dict[str, Any]
HEAD = ("gpu", "python", "sglang", "torch", "triton", "command", "shape", "rows")
"""What a result has."""
BF16, FP8 = ("bf16", "fa3", "xqa"), ("fp8", "fa3_fp8", "xqa_fp8")
"""Modes with a cache of 16 and of 8 bits: the faster one is what others are compared to."""
NAMES = {
    "bf16": "BF16, FlashInfer",
    "fa3": "BF16, FlashAttention-3",
    "fp8": "FP8, FlashInfer",
    "fa3_fp8": "FP8, FlashAttention-3",
    "xqa": "BF16, XQA",
    "xqa_fp8": "FP8, XQA",
    "exact": "int2 mode, 16 bits",
    "k4v2": "K4V2",
    "k3v2": "K3V2",
    "k2v2": "K2V2",
    "int2": "INT2",
}
"""Modes in the order of tables."""
MOSTLY = 0.9
"""Share of a load's prompt tokens that a cache has to hold for its prompts to be hits: int2 mode computes the recent
window again."""
ON_CPU = {"bf16": "BF16, PyTorch", "fp8": "FP8, PyTorch"}


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        path: its file.
        facts: the file without rows.
        rows: by mode, experiment and load; the last of several.
    """

    path: Path
    facts: dict[str, Any]
    rows: dict[str, dict[str, dict[Load, Row]]]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def model(self) -> str:
        """The shape without a number of layers, or the name of a model folder."""
        return str(self.facts["shape"]).partition(":")[0]

    @property
    def depth(self) -> str:
        """Layers of the run: ``all``, or how many of how many."""
        layers = str(self.facts["shape"]).partition(":")[2]
        whole = SHAPES.get(self.model, {}).get("num_hidden_layers")
        return "all" if not layers or int(layers) == whole else f"{layers} of {whole}"

    @property
    def whole(self) -> bool:
        """Whether no layer was left out."""
        return self.depth == "all"

    @property
    def random_weights(self) -> bool:
        """Whether weights were random; results that do not say so had a shape, or a model."""
        return bool(self.facts.get("weights", "random" if self.model in SHAPES else "") == "random")

    @property
    def gpu(self) -> str:
        """The GPU, and how many of them."""
        count = self.facts.get("gpus") or 1
        return (f"{count} x " if count > 1 else "") + str(self.facts["gpu"] or "CPU")

    def label(self, mode: str) -> str:
        """A mode's name. ``int2`` has the bits of codes that its server stated; in older results those that were the
        default then, and k2v2 where they do not say so. Stock SGLang has another backend without a GPU."""
        if mode == "int2" and (said := self.facts.get("servers", {}).get(mode)):
            return f"{NAMES[mode]} ({said['int2']['codes']})"
        if mode == "int2":
            return f"{NAMES[mode]} ({self.facts.get('default_bits', 'k2v2')})"
        return NAMES[mode] if self.facts["gpu"] else ON_CPU.get(mode, NAMES[mode])

    def modes(self, experiment: str) -> list[str]:
        """Modes that were measured, in the order of :data:`NAMES`."""
        return [mode for mode in NAMES if self.rows.get(mode, {}).get(experiment)]

    def loads(self, experiment: str) -> list[Load]:
        """Loads of any mode, by prefix cache as :data:`EXPERIMENTS` has them, requests and prompt."""
        found = {load for mode in self.modes(experiment) for load in self.rows[mode][experiment]}
        caches = list(dict.fromkeys(load.cache for load in EXPERIMENTS[experiment]))
        return sorted(found, key=lambda load: (caches.index(load.cache), load.requests, load.prompt, load.answer))

    def row(self, mode: str, experiment: str, load: Load) -> Row | None:
        """What was measured, if it was."""
        return self.rows.get(mode, {}).get(experiment, {}).get(load)

    def value(self, mode: str, experiment: str, load: Load, key: str) -> float | None:
        """A figure of a row, or a part of its ``ms``; None where it was not measured."""
        row = self.row(mode, experiment, load) or {}
        found = row.get(key, row.get("ms", {}).get(key))
        return None if found is None else float(found)

    def lost(self, mode: str, experiment: str, load: Load) -> bool:
        """Whether prompts that had been computed before were not in the cache any more, and were computed again."""
        cached = self.value(mode, experiment, load, "cached_share")
        return load.cache == HIT and cached is not None and cached < MOSTLY

    def ratio(
        self, mode: str, bases: tuple[str, ...], experiment: str, load: Load, key: str, time: bool = False
    ) -> float | None:
        """How many times faster than the fastest of ``bases`` in this run; None where either was not measured.

        Args:
            mode: what is compared.
            bases: :data:`BF16` or :data:`FP8`.
            experiment, load, key: as in :meth:`value`.
            time: whether less is faster.
        """
        own = self.value(mode, experiment, load, key)
        others = [x for base in bases if (x := self.value(base, experiment, load, key)) is not None]
        if not own or not others or not all(others):
            return None
        return min(others) / own if time else own / max(others)


def read(path: Path) -> Result:
    """A result of ``bench_paper.py``.

    Raises:
        ValueError: the file is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or (missing := [key for key in HEAD if key not in data]):
        what = f"{', '.join(missing)} is missing" if isinstance(data, dict) else "it is no object"
        raise ValueError(f"{path} is no result of bench_paper.py: {what}")
    rows: dict[str, dict[str, dict[Load, Row]]] = {}
    for mode, found in data.pop("rows").items():
        if mode not in NAMES:
            raise ValueError(f"{path}: no mode {mode}; there are {', '.join(NAMES)}")
        for row in found:
            if row.get("experiment") not in EXPERIMENTS:
                raise ValueError(f"{path}: no experiment {row.get('experiment')}; there are {', '.join(EXPERIMENTS)}")
            if lacking := [field for field in Load.__dataclass_fields__ if field not in row]:
                raise ValueError(f"{path}: a row of {mode} has no {', '.join(lacking)}")
            load = Load(row["requests"], row["prompt"], row["answer"], row["cache"])
            rows.setdefault(mode, {}).setdefault(row["experiment"], {})[load] = row
    return Result(path, data, rows)
