"""One layer's decode step as an operator that torch.compile calls and does not look into.

SGLang compiles a model's forward pass for small decode batches (``--enable-torch-compile``). Were the backend traced,
its tables would become constants and its kernel launches, which are no PyTorch operators, would end the graph in every
layer. What an operator reads apart from its arguments, the cache and the batch's tables, it looks up when it runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_oscar.attention.call import Call


# Strides as traced: values are a slice of the projections' output, heads of which kernels read at 16-byte addresses.
@torch.library.custom_op("sglang_oscar::decode", mutates_args=(), tags=[torch.Tag.needs_exact_strides])
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_cache_loc: torch.Tensor,
    layer_id: int,
    sm_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store one token per request and attend, with the backend of the forward pass that is running.

    Args:
        q: [batch, q_heads, head_dim].
        k, v: [batch, kv_heads, head_dim] in the dtype of ``q``; heads of ``v`` may have another size.
        out_cache_loc: int64 [batch], history slots of the tokens.
        layer_id: of the attention layer.
        sm_scale: factor on the logits.
        sinks: [q_heads], sink logits; None for a model without.

    Returns:
        [batch, q_heads * head_dim of ``v``] in the dtype of ``q``.
    """
    return get_attn_backend().decode(Call(q, k, v, out_cache_loc, layer_id, sm_scale, sinks))


@decode.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_cache_loc: torch.Tensor,
    layer_id: int,
    sm_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * v.shape[2])


# The cache is written, which the schema does not say: as arguments, tensors of its size would be at the mercy of a
# copy. Every layer reads what the one before computed, so the order is that of the model; and nothing may drop a call.
torch.fx.node.has_side_effect(torch.ops.sglang_oscar.decode.default)


@cache
def prepare() -> None:
    """Have norms of queries and keys traced, where SGLang calls a kernel that dynamo knows nothing about.

    Eager code keeps that kernel. Called once a process, before anything is compiled.
    """
    from sglang.srt.models import utils

    torch.compiler.substitute_in_graph(utils.apply_qk_norm)(_apply_qk_norm)


def _apply_qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Any,
    k_norm: Any,
    head_dim: int,
    alt_stream: torch.cuda.Stream | None = None,
    allow_inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q_norm(q.reshape(-1, head_dim)).view(q.shape), k_norm(k.reshape(-1, head_dim)).view(k.shape)
