"""Test plugin for SGLang: experts of ranks on any CPU.

Of a token's experts SGLang marks those of other ranks by -1, which its kernels leave out, and its experts in PyTorch do
not. Sums are handed out without NCCL.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def experts_of_rank(layer, x, topk_output, moe_runner_config):
    """What the experts of this rank add to the tokens ``x``, [tokens, hidden]."""
    assert moe_runner_config.activation == "silu"
    weights, ids, _ = topk_output
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert, (gate_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
        share = (weights * (ids == expert)).sum(dim=1, keepdim=True)
        total += share * functional.linear(functional.silu(gate) * up, down)
    return total.to(x.dtype)


def register():
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.moe import fused_moe_native

    fused_moe_native.moe_forward_native = experts_of_rank
    torch.cpu.empty_cache = lambda: None  # what SGLang calls on any device before it moves experts
    GroupCoordinator.reduce_scatterv = GroupCoordinator._deterministic_reduce_scatterv
