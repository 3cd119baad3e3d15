"""What stock SGLang lacks to run hybrid models, and to keep their states, on a machine without a GPU.

On a CPU without AMX gates of norms and of shared experts are Triton kernels, which need a GPU; so are, on any CPU,
copies of states. All are done in torch here. Attached where SGLANG_USE_CPU_ENGINE=1 and nowhere else, also for servers
that do not ask for int2: without these no hybrid model runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.errors import Int2Error
from sglang_oscar.names import is_int2


def around_gated_norm(
    original: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, g: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """The norm of what a linear layer reads, times a gate: SGLang's operator for CPUs, which the stand-in has."""
    if any(kwargs.values()) or self.activation not in ("silu", "swish"):
        return original(self, x, g, **kwargs)
    return torch.ops.sgl_kernel.fused_rmsnorm_gated_cpu(x, self.weight, g, self.eps)


def around_layernorm(
    original: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """The same norm, as other models call it; ``z`` is the gate."""
    plain = is_rms_norm and norm_before_gate and activation in ("silu", "swish")
    if not plain or z is None or bias is not None or group_size not in (None, x.shape[-1]):
        return original(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)
    return torch.ops.sgl_kernel.fused_rmsnorm_gated_cpu(x, weight, z.reshape(x.shape), eps)


def around_add_gated(
    original: Callable[..., None],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add what the shared expert says, times its gate, to what the others say: [tokens, hidden] each, in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states += (shared_output.float() * gate[:, None]).to(final_hidden_states.dtype)


def around_track_states(
    original: Callable[..., None],
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Copy the states of one layer, [slots, ...] each, of those requests that the mask says."""
    around_track_all_states(
        original, conv_states[None], ssm_states[None], cache_indices, mamba_track_mask, mamba_track_indices
    )


def around_track_all_states(
    original: Callable[..., None],
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Copy the states of all layers, [layers, slots, ...] each, of those requests that the mask says."""
    source, target = cache_indices[mamba_track_mask].long(), mamba_track_indices[mamba_track_mask].long()
    for states in (conv_states_pool, ssm_states_pool):
        states[:, target] = states[:, source]


def around_scatter_verified(
    original: Callable[..., None],
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Copy states behind tokens that are accepted, and those that are to be kept; a step of -1 is for none."""
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += list(zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True))
    wanted = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        wanted.append((mamba_track_indices, mamba_steps_to_track))
    for target, steps in wanted:
        real = ((steps >= 0) & (target >= 0)).nonzero().flatten()
        for states, behind in pairs:
            states[:, target[real].long()] = behind[:, real, steps[real].long()].to(states.dtype)


def around_validate_extra_buffer(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let states be kept every few tokens, which pages need: SGLang allows that where it has kernels of its own.

    Raises:
        Int2Error: states would be kept within pages.
    """
    view = args[-2]  # of (self, view, architecture) in older releases, (view, config) in newer ones
    if not is_int2(view):
        return original(*args, **kwargs)
    if view.page_size and view.mamba_track_interval % view.page_size:
        raise Int2Error(
            f"--mamba-track-interval {view.mamba_track_interval} is not a multiple of --page-size {view.page_size}"
        )
