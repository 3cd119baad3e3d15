"""Experts in torch, for the classes that call SGLang's kernel for them by name, which needs a GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional

NAME = "fused_moe"


def stand_in() -> None:
    """Put :func:`experts` in the place of SGLang's ``fused_moe`` in all modules of models that are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.models.") and hasattr(module, NAME):
            setattr(module, NAME, experts)


def experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """What the chosen experts say, weighted.

    Args:
        hidden_states: [tokens, hidden].
        w1: gates and inputs, [experts, 2 * width, hidden].
        w2: outputs, [experts, hidden, width].
        topk_output: weights and ids [tokens, chosen] and a third thing.
        moe_runner_config: SGLang's; a factor on the result.

    Returns:
        [tokens, hidden] in the dtype of ``hidden_states``.
    """
    weights, ids, _ = topk_output
    inner = torch.einsum("th,ewh->tew", hidden_states.float(), w1.float())
    gate, up = inner.chunk(2, dim=-1)
    said = torch.einsum("tew,ehw->teh", functional.silu(gate) * up, w2.float())
    chosen = torch.zeros(len(said), len(w1)).scatter_add_(1, ids.long(), weights.float())
    factor = moe_runner_config.routed_scaling_factor or 1.0
    return (torch.einsum("te,teh->th", chosen, said) * factor).to(hidden_states.dtype)
