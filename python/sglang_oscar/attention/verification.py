"""Masks of verification: from what SGLang's drafts say to words that the kernels read."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kernels.visible import causal_words, words_of
from sglang_oscar.attach.arguments import drafts_with_model


def is_chain(spec_info: Any) -> bool:
    """Whether the new tokens of a request do not branch: its words are those of a causal mask.

    Args:
        spec_info: SGLang's verify input.
    """
    return getattr(spec_info, "custom_mask", None) is None or getattr(spec_info, "topk", None) == 1


def unread_mask(server_args: Any, device: torch.device) -> Any:
    """The layout of masks that nobody reads, as SGLang's VerifyMask; None where they are read.

    A draft model's drafts are chains. By default SGLang fills a row as long as the request for each of them and builds
    the mask, places and slots in several launches; recent releases do all of it in one where masks are short. The
    buffer is empty, so SGLang allocates a mask a step, which is no launch.

    Args:
        server_args: SGLang's ServerArgs, resolved.
        device: where masks live.
    """
    if not drafts_with_model(server_args):
        return None
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    buffer = torch.empty(0, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=False)


def visible_words(spec_info: Any, seq_lens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which new tokens each new token of a step sees.

    Args:
        spec_info: SGLang's verify input; without a mask, or with one branch (``topk``), drafts are a chain. Its mask is
            flat and has, request after request, a row for every new token. On a CPU an entry of it is for a new token
            of the request; on a GPU entries for all earlier tokens come before. Sizes do not tell the two apart where
            a CUDA graph is padded.
        seq_lens: [batch], tokens of each request before the new ones.
        tokens: new tokens of a request.

    Returns:
        int64 [batch, tokens], see :mod:`oscar_kernels.visible`.
    """
    batch = len(seq_lens)
    if is_chain(spec_info):
        return causal_words(tokens, seq_lens.device).expand(batch, tokens)
    mask = spec_info.custom_mask
    if mask.device.type == "cpu":
        return words_of(mask.view(batch, tokens, tokens).bool())
    return _of_whole_rows(mask, seq_lens.long(), tokens)


def _of_whole_rows(mask: torch.Tensor, lens: torch.Tensor, tokens: int) -> torch.Tensor:
    index = torch.arange(tokens, device=lens.device)
    width = lens + tokens
    begin = width.cumsum(0) * tokens - width * tokens
    at = begin[:, None, None] + index[None, :, None] * width[:, None, None] + lens[:, None, None] + index
    # Requests that pad a CUDA graph have no mask; what they see is nobody's.
    return words_of(mask[at.clamp(max=mask.numel() - 1)].bool())
