"""Stages of a pipeline: each has rows, rings and sinks of its own layers, and decides for itself what runs.

Stages agree, as they see the same requests and results in the same order. What one of them alone knows, it tells: the
last one, which logits are no numbers.
"""

from __future__ import annotations

from typing import Any

from sglang_oscar.requests import nan

COLUMN = "oscar_logits"
"""Beside the sampled tokens that the last stage sends to all."""


def after_prepare_tensor_dict(tensors: dict[str, Any], self: Any, result: Any, batch: Any) -> None:
    """On the last stage: send a logit of every request along with its token."""
    if (logits := nan.hand_on(result, batch)) is not None:
        tensors[COLUMN] = logits


def after_prep_batch_result(result: Any, self: Any, batch: Any, mb_metadata: Any, pp_outputs: Any) -> None:
    """On every stage: take them out again."""
    if (logits := pp_outputs.tensors.get(COLUMN)) is not None:
        nan.lay_beside(result, batch, logits)
