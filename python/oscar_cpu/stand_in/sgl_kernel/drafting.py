"""Operators of drafting with a model, in torch: where drafts are stored, and how they hang together.

Arguments are those of SGLang's operators of these names; what is said to be written is written in place.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copy slots ``source`` to slots ``target`` of every buffer.

    Args:
        pointers: uint64 [buffers], addresses; what they point to is written, after all of it is read.
        strides: int64 [buffers], bytes of a slot.
        target, source: int64 [slots].
    """
    for pointer, size in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + slot * size, size) for slot in source.tolist()]
        for slot, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(pointer + slot * size, row, size)


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Write the slots of the ``topk * steps`` positions behind each request to ``out``, request after request."""
    count = topk * steps
    for request, (row, begin) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        out[request * count : (request + 1) * count] = req_to_token[row, begin : begin + count].to(out.dtype)


def fill_bonus_tokens_cpu(accepted: torch.Tensor, accept_lens: torch.Tensor, bonus: torch.Tensor, stride: int) -> None:
    """Write the last accepted token of each request, whose tokens are ``stride`` apart, to ``bonus``."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus.copy_(accepted.flatten()[last])


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mask_mode: Any,
) -> None:
    """Lay out each request's tree behind its root; ``tree_mask`` to ``next_sibling`` are written.

    Args:
        parents: [batch, candidates / topk], the candidate that a group of ``topk`` candidates follows; entry 0 is the
            root's.
        selected: [batch, tokens - 1], the candidates that became drafts, ascending.
        seq_lens: [batch], tokens before the root.
        tree_mask: bool, [batch * tokens * tokens] of it: draft i sees its ancestors and itself.
        positions: [batch * tokens], depth behind ``seq_lens``.
        index: [batch, tokens], index of a token in the batch.
        next_token: [batch, tokens], a token's first child, or -1 as it comes.
        next_sibling: [batch, tokens], the next child of the same parent, or -1 as it comes.
        topk, steps, tokens: sizes.
        mask_mode: of SGLang's layouts of masks the one with new tokens only.

    Raises:
        NotImplementedError: another layout.
    """
    if mask_mode.name != "QLEN_ONLY":
        raise NotImplementedError(f"the stand-in knows no tree mask of layout {mask_mode.name}")
    batch = len(seq_lens)
    mask = torch.eye(tokens, dtype=torch.bool).repeat(batch, 1, 1)
    depth = torch.zeros(batch, tokens, dtype=torch.long)
    for request in range(batch):
        chosen = selected[request].tolist()
        newest: dict[int, int] = {}  # child of every parent
        for token, candidate in enumerate(chosen, start=1):
            group = candidate // topk
            parent = 0 if group == 0 else chosen.index(int(parents[request, group])) + 1
            mask[request, token] |= mask[request, parent]
            depth[request, token] = depth[request, parent] + 1
            if parent in newest:
                next_sibling[request, newest[parent]] = token
            else:
                next_token[request, parent] = token
            newest[parent] = token
    tree_mask[: mask.numel()] = mask.flatten()
    positions.copy_((depth + seq_lens.long()[:, None]).flatten())
    index.copy_(torch.arange(batch * tokens).view(batch, tokens))
