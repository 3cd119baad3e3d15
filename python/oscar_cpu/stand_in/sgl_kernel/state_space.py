"""The state spaces of Mamba2, token by token, in float32.

A head's state S is a matrix [head_dim, state]. A token with input x, step dt and the B and C of the head's group decays
it and is read from it: S <- e^(A dt) S + dt x B^T; y = S C + D x.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def _steps(dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool) -> torch.Tensor:
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    return functional.softplus(dt) if dt_softplus else dt


def _token(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the next state and what is read from it, without D.

    Args:
        state: [..., heads, head_dim, state], float32.
        x: [..., heads, head_dim].
        dt, A: [..., heads] and [heads].
        B, C: [..., groups, state].
    """
    heads = x.shape[-2]
    B, C = (of.float().repeat_interleave(heads // of.shape[-2], dim=-2) for of in (B, C))
    state = state * (A.float() * dt).exp()[..., None, None] + (dt[..., None] * x.float())[..., None] * B[..., None, :]
    return state, (state @ C[..., None]).squeeze(-1)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefill of several sequences, as SGLang's mixer of Mamba2 calls it.

    Args:
        x: [1, tokens, heads, head_dim].
        dt: [1, tokens, heads].
        A, D, dt_bias: [heads], of the layer.
        B, C: [1, tokens, groups, state].
        chunk_size: tokens between states that are handed out, over all sequences as they lie.
        cu_seqlens: [sequences + 1], where each begins and the last ends.
        initial_states: [sequences, heads, head_dim, state]; None for zeros.
        out: like ``x``; written.
        state_dtype: of states that are returned.
        track_seq_idx, track_end_locs: sequences, and tokens from the batch's first, in front of which the state is
            wanted.

    Returns:
        States before every ``chunk_size`` tokens [1, chunks, heads, head_dim, state], behind every sequence
        [sequences, ...], and those wanted [1, wanted, ...].
    """
    x, B, C = x[0], B[0], C[0]
    dt = _steps(dt[0], dt_bias, dt_softplus)
    tokens, heads, head_dim = x.shape
    grid = torch.zeros(-(-tokens // chunk_size), heads, head_dim, B.shape[-1], dtype=state_dtype)
    ends = track_end_locs.tolist() if track_end_locs is not None else []
    owners = track_seq_idx.tolist() if track_seq_idx is not None else []
    wanted, last = [grid.new_zeros(grid.shape[1:]) for _ in ends], []
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = torch.zeros(grid.shape[1:]) if initial_states is None else initial_states[sequence].float()
        for token in range(begin, end + 1):
            for place, (owner, at) in enumerate(zip(owners, ends, strict=True)):
                if (owner, at) == (sequence, token):
                    wanted[place] = state.to(state_dtype)
            if token == end:
                break
            if token % chunk_size == 0:
                grid[token // chunk_size] = state.to(state_dtype)
            state, read = _token(state, x[token], dt[token], A, B[token], C[token])
            out[0, token] = (read + D.float()[:, None] * x[token].float()).to(out.dtype)
        last.append(state.to(state_dtype))
    return grid[None], torch.stack(last), torch.stack(wanted)[None] if wanted else grid[None, :0]


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Decode: one token of every sequence; states are replaced in place.

    Args:
        state: [slots, heads, head_dim, state].
        x: [sequences, heads, head_dim].
        dt, dt_bias, A, D: of a head, spread over its channels, and A over its states.
        B, C: [sequences, groups, state].
        z: None.
        state_batch_indices: [sequences], slots; below 0 for padding, whose output is left.
        out: [sequences, heads * head_dim or heads, head_dim]; written.
    """
    assert z is None
    real = state_batch_indices >= 0
    slots = state_batch_indices[real].long()
    steps = _steps(dt[real, :, 0], dt_bias[:, 0], dt_softplus)
    new, read = _token(state[slots].float(), x[real], steps, A[:, 0, 0], B[real], C[real])
    state[slots] = new.to(state.dtype)
    out[real] = (read + D.float() * x[real].float()).reshape(out[real].shape).to(out.dtype)
