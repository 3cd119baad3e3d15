"""SGLang's attention of hybrid models, which commits states behind a step of verification, with windows beside them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.cache import cache_of


class KeepsWindows(HybridLinearAttnBackend):
    """Keeps windows where states are kept."""

    @classmethod
    def in_place_of(cls, stock: Any) -> KeepsWindows:
        """The same attention, of the same parts.

        Raises:
            Int2Error: SGLang has built something else.
        """
        if type(stock) is not HybridLinearAttnBackend:
            raise Int2Error("SGLang builds attention of hybrid models in another way; use --kv-cache-dtype auto")
        return cls(stock.full_attn_backend, stock.linear_attn_backend, stock.full_attn_layers)

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: Any,
        req_pool_indices: torch.Tensor,
    ) -> None:
        """Commit states, then keep windows beside those that are kept: SGLang has decided of which requests, and behind
        which accepted token, -1 in ``mamba_steps_to_track`` [requests] for none. ``mamba_track_indices`` [requests] is
        -1 of one that has ended, and is verified once more: its slots may be another's."""
        super().update_mamba_state_after_mtp_verify(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model,
            req_pool_indices=req_pool_indices,
        )  # fmt: skip
        cache = cache_of(self.full_attn_backend.token_to_kv_pool)
        if cache is not None and cache.kept is not None and mamba_track_indices is not None:
            assert mamba_steps_to_track is not None
            slots = torch.where(mamba_steps_to_track >= 0, mamba_track_indices[: len(mamba_steps_to_track)], 0)
            cache.kept.keep_verified(req_pool_indices.long(), slots.long().clamp(min=0))
