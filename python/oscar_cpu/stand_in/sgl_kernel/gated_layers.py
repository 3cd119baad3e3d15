"""What surrounds attention in hybrid models: norms, output gates, and cutting up fused projections."""

from __future__ import annotations

import torch
from torch.nn import functional


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square, times ``weight``, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _by_head(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    """Norm of every head; Gemma's weights are differences from one. [tokens, heads * head_dim], contiguous."""
    heads = x.reshape(*x.shape[:-1], -1, head_dim)
    return _rms_norm(heads, 1.0 + weight.float(), eps).to(x.dtype).reshape(x.shape)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of queries and keys, head by head; q [tokens, q_heads * head_dim], k likewise."""
    return _by_head(q, q_weight, eps, head_dim), _by_head(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_q_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms of queries and keys, and the output gate, which lies behind the query of every head.

    Args:
        q_gate: [tokens, q_heads * 2 * head_dim].
        k: [tokens, kv_heads * head_dim].

    Returns:
        queries, keys and gate; [tokens, heads * head_dim] each.
    """
    q, gate = q_gate.reshape(len(q_gate), num_q_heads, 2, head_dim).unbind(2)
    q, k = fused_qk_gemma_rmsnorm_cpu(q.reshape(len(q), -1), k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(len(gate), -1)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """x <- x sigmoid(gate), in place; ``gate`` has as many elements, by token and head.

    Up to 0.5.18 SGLang says that it is in place, and goes on with what is returned; later it does neither.

    Raises:
        NotImplementedError: asked for a tensor besides ``x``, which no release does.
    """
    if not inplace:
        raise NotImplementedError("fused_sigmoid_mul_cpu overwrites its argument; inplace=False is not implemented")
    return x.copy_(x.float() * gate.reshape(x.shape).float().sigmoid())


def fused_rmsnorm_gated_cpu(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of ``x``, times silu(gate); [rows, head_dim] in the dtype of ``x``."""
    return (_rms_norm(x, weight, eps) * functional.silu(gate.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, k_heads: int, heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut projections whose parts lie one behind the other.

    Args:
        mixed_qkvz: [tokens, 2 * k_heads * k_dim + 2 * heads * v_dim].
        mixed_ba: [tokens, 2 * heads].

    Returns:
        queries, keys and values [tokens, ...], still together; z [tokens, heads, v_dim]; b and a [tokens, heads].
    """
    qkv, z = mixed_qkvz.split([2 * k_heads * k_dim + heads * v_dim, heads * v_dim], dim=-1)
    b, a = mixed_ba.split([heads, heads], dim=-1)
    return qkv.contiguous(), z.reshape(len(z), heads, v_dim), b.contiguous(), a.contiguous()
