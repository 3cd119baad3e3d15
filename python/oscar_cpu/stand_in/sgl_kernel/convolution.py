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
) -> torch.Tensor:
    """Decode: one token of every sequence; states are replaced in place.

    Args:
        x: [sequences, channels].
        conv_state: [slots, channels, width - 1].
        weight, bias, activation: of the filter.
        conv_state_indices: [sequences], slots; below 0 for padding, whose output is 0.

    Returns:
        [sequences, channels] in the dtype of ``x``.
    """
    assert conv_state_indices is not None
    past, real = weight.shape[1] - 1, conv_state_indices >= 0
    slots = conv_state_indices[real].long()
    inputs = torch.cat([conv_state[slots, :, :past].to(x.dtype), x[real, :, None]], dim=2)
    conv_state[slots, :, :past] = inputs[:, :, 1:].to(conv_state.dtype)
    out = torch.zeros_like(x)
    out[real] = _convolve(inputs, weight, bias, activation).squeeze(-1)
    return out
