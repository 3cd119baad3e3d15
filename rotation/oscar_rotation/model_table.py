"""Per-model settings of the calibration and evaluation drivers: one table, ``models.json``, that all of them read.

Sources: section 5.1 of the paper (sampling, generation length, seeds, clip ratios) and the public release's table of
models (tensor parallelism, reasoning parsers; clip 0.96/0.96 in its 32B script). Hybrid models are
in neither: sampling is that of their cards, and there are as many GPUs as weights need. A model that is not in the
table has the defaults. What is fitted is the same for all (:mod:`oscar_rotation.defaults`); the published recipe is
asked for by name.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.files.identity import model_name

TABLE = "models.json"
TRUST = "--trust-remote-code"


class Clip(BaseModel):
    """Clip ratios of keys and values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: float = Field(gt=0, le=1)
    v: float = Field(gt=0, le=1)


class ModelSettings(BaseModel):
    """Settings of one model.

    Attributes:
        name: folder under ``rotation/``.
        model: hub id or path.
        title: how tables name it.
        tp_dump, tp_eval: tensor parallelism of the dump and of the evaluation.
        gpu: CUDA_VISIBLE_DEVICES; empty leaves it alone.
        group_size: channels per quantization group.
        reasoning_parser: SGLang's parser for the thinking part, if any.
        trust_remote_code: whether Python code of the model's repository may run here and in every server; true for a
            model that needs it, and where the user says so.
        server_args: further flags of every server.
        sampling: temperature, top_p, top_k of the evaluation.
        max_tokens, max_tokens_of: generation length, and exceptions by benchmark.
        clip: ratios that the evaluation sets.
        seeds: runs per benchmark.
        concurrency: requests in flight during an evaluation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    model: str
    title: str
    tp_dump: int = Field(gt=0)
    tp_eval: int = Field(gt=0)
    gpu: str
    group_size: int = Field(GROUP_SIZE, gt=0)
    reasoning_parser: str | None = None
    trust_remote_code: bool
    server_args: tuple[str, ...]
    sampling: dict[str, float]
    max_tokens: int = Field(gt=0)
    max_tokens_of: dict[str, int]
    clip: Clip
    seeds: int = Field(gt=0)
    concurrency: int = Field(gt=0)

    @property
    def server_flags(self) -> list[str]:
        """Flags of every server of the model."""
        return [*([TRUST] if self.trust_remote_code else []), *self.server_args]

    def tokens_for(self, benchmark: str) -> int:
        """Generation length of a benchmark."""
        return self.max_tokens_of.get(benchmark, self.max_tokens)

    def overridden(self, **values: Any) -> ModelSettings:
        """A copy with the given fields replaced; None keeps what is there."""
        return ModelSettings(**(self.model_dump() | {k: v for k, v in values.items() if v is not None}))


@cache
def _table() -> dict[str, Any]:
    return json.loads(resources.files("oscar_rotation").joinpath(TABLE).read_text(encoding="utf-8"))


def known_models() -> list[str]:
    """Names in the table."""
    return list(_table()["models"])


def model_settings(name: str) -> ModelSettings:
    """Settings of a model by its name in the table, its hub id, or, with the defaults, any id or path.

    >>> model_settings("qwen3-32B").clip.v, model_settings("Qwen/Qwen3-32B").name
    (0.96, 'qwen3-32B')
    >>> model_settings("some/other-model").tp_eval
    1
    """
    table = _table()
    for key, entry in table["models"].items():
        if name in (key, entry["model"]):
            return ModelSettings(**(table["defaults"] | {"name": key} | entry))
    short = model_name(name)
    return ModelSettings(**(table["defaults"] | {"name": short, "model": name, "title": short}))
