"""Hook into SGLang's commit of states behind a step of verification: windows are kept where states are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.memory.cache import cache_of


def around_update_states(
    original: Callable[..., None],
    self: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    model: Any,
    req_pool_indices: torch.Tensor,
) -> None:
    """Commit states, then keep windows beside those that are kept: SGLang has decided of which requests, and behind
    which accepted token, -1 in ``mamba_steps_to_track`` [requests] for none."""
    original(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model,
        req_pool_indices=req_pool_indices,
    )  # fmt: skip
    cache = cache_of(self.full_attn_backend.token_to_kv_pool)
    if cache is not None and cache.kept is not None and mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        slots = torch.where(mamba_steps_to_track >= 0, mamba_track_indices[: len(mamba_steps_to_track)], 0)
        cache.kept.keep_verified(req_pool_indices.long(), slots.long())
