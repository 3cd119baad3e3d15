"""Models to measure on, as trained and with outliers that change nothing but the cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accuracy.calibration import Calibration, calibrate
from oscar_rotation.math.covariance import KeyCovariance, QueryCovariance, ValueCovariance
from reference_model.outliers import choose_pair, scale_pair, scale_value_channel


@dataclass(frozen=True)
class Regime:
    """Outliers of a regime: key factor of one rotary pair per layer, value factor of one channel per kv head."""

    name: str
    keys: float = 1.0
    values: float = 1.0


REGIMES = (
    Regime("as trained"),
    Regime("keys x4", 4),
    Regime("keys x32", 32),
    Regime("keys x32, values x16", 32, 16),
)


RECORD = "training.json"
"""File of a model that scripts/train_reference_model.py trained; says which outliers were put into it."""


def is_shipped(source: str | Path) -> bool:
    """Whether scripts/train_reference_model.py trained a model, so that outliers can be put into it."""
    return (Path(source) / RECORD).is_file()


BEHIND_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""What configurations call a change of the logits behind the output matrix."""


def check_head(config: Any, source: str | Path) -> None:
    """The laboratory multiplies last states by the output matrix itself.

    Raises:
        SystemExit: the model does more than that.
    """
    for name in BEHIND_THE_HEAD:
        if getattr(config.get_text_config(), name, None) not in (None, 1):
            raise SystemExit(f"error: {source} has {name}: logits that are changed are not measured here")


def load(source: str | Path, device: str) -> tuple[Any, Any]:
    """A model in float32 without outliers of its making, and its tokenizer (of ``transformers``).

    Outliers that :data:`RECORD` says were put into it are taken out, which is exact.

    Args:
        source: folder or id of the Hub.
        device: torch device.

    Raises:
        SystemExit: see :func:`check_head`.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().to(device)
    check_head(model.config, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    record = Path(source) / RECORD
    if is_shipped(source):
        facts = json.loads(record.read_text(encoding="utf-8"))
        state = dict(model.state_dict())
        for layer, pair in enumerate(facts["outlier_pairs"]):
            state = scale_pair(state, layer, pair, 1 / facts["outlier_factor"])
        model.load_state_dict(state)
    return model, tokenizer


def choose_outliers(calibration: Calibration, regime: Regime) -> tuple[list[int], list[list[int]]]:
    """Rotary pair per layer and value channel per layer and kv head."""
    pairs, channels = [], []
    for layer in range(len(calibration.layers)):
        q = calibration.covariance(layer, QueryCovariance).shared()
        k = calibration.covariance(layer, KeyCovariance).shared()
        v = calibration.covariance(layer, ValueCovariance).per_head()
        pairs.append(choose_pair(q, k, regime.keys) if regime.keys != 1 else -1)
        channels.append(v.diagonal(dim1=-2, dim2=-1).argmax(-1).tolist())
    return pairs, channels


def outlier_state(model: Any, ids: torch.Tensor, regime: Regime) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights of a model with the outliers of a regime, and the rotary pairs chosen, one per layer (none: empty).

    Args:
        model: a Qwen3 model without outliers; not changed.
        ids: calibration text, which decides where the outliers go.
        regime: which outliers.

    Raises:
        ValueError: key outliers in a model without q_norm and k_norm.
    """
    state, d = dict(model.state_dict()), model.config.head_dim
    if regime.keys == regime.values == 1:
        return state, []
    if not any(name.endswith("q_norm.weight") for name in state):
        raise ValueError("outliers need a model with q_norm and k_norm, such as Qwen3")
    pairs, channels = choose_outliers(calibrate(model, ids), regime)
    for layer, (pair, by_head) in enumerate(zip(pairs, channels, strict=True)):
        if regime.keys != 1:
            state = scale_pair(state, layer, pair, regime.keys, d)
        for head, channel in enumerate(by_head if regime.values != 1 else ()):
            state = scale_value_channel(state, layer, head, channel, regime.values, d)
    return state, pairs if regime.keys != 1 else []


def apply_regime(model: Any, trained: dict[str, torch.Tensor], ids: torch.Tensor, regime: Regime) -> None:
    """Give a model its trained weights and the outliers of a regime; see :func:`outlier_state`."""
    model.load_state_dict(trained)
    model.load_state_dict(outlier_state(model, ids, regime)[0])
