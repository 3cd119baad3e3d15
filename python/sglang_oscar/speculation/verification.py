"""Masks of verification: from what SGLang's drafts say to words that the kernels read."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.visible import causal_words, words_of


def visible_words(spec_info: Any, seq_lens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which new tokens each new token of a step sees.

    Args:
        spec_info: SGLang's verify input. Its mask has an entry for every new token and either every new token of the
            request, or every token of the request and then its new ones; without a mask, drafts are a chain.
        seq_lens: [batch], tokens of each request before the new ones.
        tokens: new tokens of a request.

    Returns:
        int64 [batch, tokens], see :mod:`oscar_kernels.visible`.
    """
    batch, mask = len(seq_lens), getattr(spec_info, "custom_mask", None)
    if mask is None:
        return causal_words(tokens, seq_lens.device).expand(batch, tokens)
    if mask.numel() == batch * tokens * tokens:
        return words_of(mask.view(batch, tokens, tokens).bool())
    lens, index = seq_lens.long(), torch.arange(tokens, device=seq_lens.device)
    width = lens + tokens
    begin = width.cumsum(0) * tokens - width * tokens
    at = begin[:, None, None] + index[None, :, None] * width[:, None, None] + lens[:, None, None] + index
    # Requests that pad a CUDA graph have no mask; what they see is nobody's.
    return words_of(mask[at.clamp(max=mask.numel() - 1)].bool())
