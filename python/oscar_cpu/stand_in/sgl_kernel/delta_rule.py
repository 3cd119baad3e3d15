"""The gated delta rule of linear attention in float32.

A head's state S is a matrix [v_dim, k_dim]. A token decays it, corrects what it holds under its key towards its value,
and reads it with its query: S <- e^g S; S <- S + beta (v - S k) k^T; o = S q. Queries and keys are normalized first,
and queries multiplied by 1/sqrt(k_dim). Decoding takes one token after the other, prefill whole chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

CHUNK = 64
"""Tokens between states that prefill hands out, SGLang's FLA_CHUNK_SIZE."""


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g and step size beta of every token and head, float32 [1, tokens, heads].

    Args:
        A_log, dt_bias: [heads], of the layer.
        a, b: [tokens, heads], of the tokens.
    """
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _normalized(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Unit vectors in float32, every one for its share of ``heads``."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the next state and what is read from it.

    Args:
        state: [..., heads, v_dim, k_dim].
        q, k: [..., heads, k_dim], normalized, queries scaled.
        v: [..., heads, v_dim].
        g, beta: [..., heads].
    """
    state = state * g.exp()[..., None, None]
    missing = beta[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state = state + missing[..., None] * k[..., None, :]
    return state, (state @ q[..., None]).squeeze(-1)


def _chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What as many steps come to: the state behind the last token, and what each token reads.

    Token t adds a correction u_t k_t^T, which has decayed by e^(g_s + ... + g_(t+1)) when token s sees it. So the u of
    a chunk are the solution of a triangular system: u_s + beta_s sum_(t<s) decay_st (k_s k_t) u_t = beta_s (v_s - what
    the state before the chunk holds under k_s).

    Args:
        state: [heads, v_dim, k_dim].
        q, k: [tokens, heads, k_dim], normalized, queries scaled.
        v: [tokens, heads, v_dim].
        g, beta: [tokens, heads].

    Returns:
        [heads, v_dim, k_dim] and [tokens, heads, v_dim].
    """
    q, k, v, beta = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), beta.mT[..., None]
    since = g.mT.cumsum(-1)
    decay = (since[:, :, None] - since[:, None, :]).tril().exp().tril()
    held, old = since.exp()[..., None], state.mT
    new = torch.linalg.solve_triangular(
        beta * decay * (k @ k.mT), beta * (v - held * (k @ old)), upper=False, unitriangular=True
    )
    read = held * (q @ old) + (decay * (q @ k.mT)) @ new
    state = held[:, -1:] * state + (decay[:, -1, :, None] * new).mT @ k
    return state, read.transpose(0, 1)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill of several sequences; their states are replaced in place.

    Args:
        q, k: [1, tokens, k_heads, k_dim].
        v: [1, tokens, heads, v_dim].
        g, beta: [1, tokens, heads].
        initial_state: [slots, heads, v_dim, k_dim].
        cu_seqlens: [sequences + 1], where each begins and the last ends.
        initial_state_indices: [sequences], slots; below 0 where there is none.
        head_first, use_qk_l2norm_in_kernel: as SGLang calls it; nothing else is done.

    Returns:
        output [1, tokens, heads, v_dim] in the dtype of ``v``; None; and the state before every chunk of 64 tokens of
        every sequence, one behind the other: float32 [1, chunks, heads, v_dim, k_dim].
    """
    assert (head_first, use_qk_l2norm_in_kernel) == (False, True)
    heads, k_dim = v.shape[2], k.shape[3]
    keys, values = _normalized(k[0], heads), v[0].float()
    queries = _normalized(q[0], heads) * k_dim**-0.5
    out, chunks = torch.zeros_like(v), []
    ends = cu_seqlens.tolist()
    for index, (begin, end) in enumerate(pairwise(ends)):
        slot = int(initial_state_indices[index])
        held = initial_state[slot] if slot >= 0 else torch.zeros_like(initial_state[0])
        state = held.to(torch.float32, copy=True)
        for first in range(begin, end, CHUNK):
            chunks.append(state)
            span = slice(first, min(first + CHUNK, end))
            state, read = _chunk(state, queries[span], keys[span], values[span], g[0, span], beta[0, span])
            out[0, span] = read.to(v.dtype)
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(chunks)[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int = 1,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode: one token of every sequence; states are replaced in place. Or verification of several, behind which
    states are left as they are.

    Args:
        A_log, dt_bias: [heads].
        q, k: [1, tokens, k_heads, k_dim].
        v: [1, tokens, heads, v_dim].
        a, b: [tokens, heads].
        initial_state_source: [slots, heads, v_dim, k_dim].
        initial_state_indices: [sequences], slots; below 0 for padding, whose output is 0.
        cu_seqlens: [sequences + 1], ``cache_steps`` tokens each.
        use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, is_kda: as SGLang calls it; nothing else is done.
        disable_state_update: whether this is verification.
        intermediate_states_buffer: [units, tokens, heads, v_dim, k_dim], written: the state behind every token.
        intermediate_state_indices: [sequences], units of it.
        cache_steps: tokens of a sequence.
        retrieve_parent_token: [sequences, tokens], behind which token each comes; None where they are chains.

    Returns:
        [1, tokens, heads, v_dim] in the dtype of ``v``.
    """
    assert (use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, is_kda) == (True, 1.0, 20.0, False)
    heads, k_dim = v.shape[2], k.shape[3]
    if disable_state_update:
        assert intermediate_states_buffer is not None
        assert intermediate_state_indices is not None
        g, beta = gates(A_log, a, b, dt_bias)
        queries, keys = _normalized(q[0], heads) * k_dim**-0.5, _normalized(k[0], heads)
        out = torch.zeros_like(v)
        for index, slot in enumerate(initial_state_indices[: len(cu_seqlens) - 1].tolist()):
            if slot < 0:
                continue
            unit, first = int(intermediate_state_indices[index]), index * cache_steps
            for step in range(cache_steps):
                parent = step - 1 if retrieve_parent_token is None else int(retrieve_parent_token[index, step])
                held = intermediate_states_buffer[unit, parent] if step else initial_state_source[slot]
                at = first + step
                state, read = _step(held.float(), queries[at], keys[at], v[0, at].float(), g[0, at], beta[0, at])
                intermediate_states_buffer[unit, step] = state.to(intermediate_states_buffer.dtype)
                out[0, at] = read.to(v.dtype)
        return out
    assert len(cu_seqlens) == q.shape[1] + 1
    real = initial_state_indices >= 0
    slots = initial_state_indices[real].long()
    g, beta = gates(A_log, a[real], b[real], dt_bias)
    queries, keys = _normalized(q[0, real], heads) * k_dim**-0.5, _normalized(k[0, real], heads)
    state = initial_state_source[slots].float()
    state, read = _step(state, queries, keys, v[0, real].float(), g[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    out = torch.zeros_like(v)
    out[0, real] = read.to(v.dtype)
    return out
