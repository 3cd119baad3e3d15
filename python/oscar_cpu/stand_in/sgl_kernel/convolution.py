"""The short causal convolution in front of linear attention: a filter of its own for every channel.

What a sequence needs of its past are the inputs of its last ``width - 1`` tokens, which a state slot holds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Outputs of all positions of ``inputs`` that have a whole filter before them, in the dtype of ``inputs``.

    Args:
        inputs: [..., channels, tokens + width - 1].
        weight: [channels, width].
        bias: [channels] or None.
        activation: ``silu`` or None.
    """
    assert activation in ("silu", "swish", None)
    windows = inputs.float().unfold(-1, weight.shape[1], 1)
    out = (windows * weight.float()[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.float()[:, None]
    return (out if activation is None else functional.silu(out)).to(inputs.dtype)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **kwargs: Any,
) -> torch.Tensor:
    """Prefill of several sequences; their states are replaced in place.

    Args:
        x: [channels, tokens].
        weight, bias, activation: of the filter.
        conv_states: [slots, channels, width - 1].
        query_start_loc: [sequences + 1], where each begins and the last ends.
        cache_indices: [sequences], slots.
        has_initial_state: bool [sequences]; without one a sequence begins behind zeros.

    Returns:
        [channels, tokens] in the dtype of ``x``.
    """
    out, past = torch.zeros_like(x), weight.shape[1] - 1
    ends = query_start_loc.tolist()
    for index, (begin, end) in enumerate(pairwise(ends)):
        slot = int(cache_indices[index])
        before = conv_states[slot, :, :past].to(x.dtype)
        before = before if bool(has_initial_state[index]) else torch.zeros_like(before)
        inputs = torch.cat([before, x[:, begin:end]], dim=1)
        out[:, begin:end] = _convolve(inputs, weight, bias, activation)
        conv_states[slot, :, :past] = inputs[:, inputs.shape[1] - past :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode: one token of every sequence; states are replaced in place. Or verification of several, behind which
    states are left as they are.

    Args:
        x: [sequences, channels] in decode, [sequences, channels, tokens] in verification.
        conv_state: [slots, channels, width - 1].
        weight, bias, activation: of the filter.
        conv_state_indices: [sequences], slots; below 0 for padding, whose output is 0.
        intermediate_conv_window: [units, tokens, channels, width - 1], written: the state behind every token.
        intermediate_state_indices: [sequences], units of it.
        retrieve_next_token, retrieve_next_sibling: [sequences, tokens], first child and next sibling of every token, or
            -1; None where tokens are chains.
        retrieve_parent_token: [sequences, tokens], written.

    Returns:
        in shape and dtype of ``x``.
    """
    assert conv_state_indices is not None
    past, real = weight.shape[1] - 1, conv_state_indices >= 0
    if x.dim() == 2:
        slots = conv_state_indices[real].long()
        inputs = torch.cat([conv_state[slots, :, :past].to(x.dtype), x[real, :, None]], dim=2)
        conv_state[slots, :, :past] = inputs[:, :, 1:].to(conv_state.dtype)
        out = torch.zeros_like(x)
        out[real] = _convolve(inputs, weight, bias, activation).squeeze(-1)
        return out
    assert intermediate_conv_window is not None
    assert intermediate_state_indices is not None
    out = torch.zeros_like(x)
    for index in real.nonzero().flatten().tolist():
        parents = [token - 1 for token in range(x.shape[2])]
        if retrieve_next_token is not None:
            assert retrieve_next_sibling is not None
            assert retrieve_parent_token is not None
            parents = parents_of(retrieve_next_token[index].tolist(), retrieve_next_sibling[index].tolist())
            retrieve_parent_token[index] = torch.tensor(parents).clamp(min=0)
        unit = int(intermediate_state_indices[index])
        states: list[torch.Tensor] = []
        for token, parent in enumerate(parents):
            before = conv_state[int(conv_state_indices[index]), :, :past].to(x.dtype) if parent < 0 else states[parent]
            inputs = torch.cat([before, x[index, :, token, None]], dim=1)
            out[index, :, token] = _convolve(inputs, weight, bias, activation).squeeze(-1)
            states.append(inputs[:, 1:])
            intermediate_conv_window[unit, token] = states[-1].to(intermediate_conv_window.dtype)
    return out


def parents_of(child: list[int], sibling: list[int]) -> list[int]:
    """The parent of every token of a tree by first children and next siblings, -1 for none; what hangs nowhere has the
    root."""
    parents = [-1] + [0] * (len(child) - 1)
    for token, first in enumerate(child):
        below = first
        while below != -1:
            parents[below] = token
            below = sibling[below]
    return parents
