"""Operators of verification, in torch: which slots new tokens take, and which of them are accepted.

Arguments are those of SGLang's operators of these names; what is said to be written is written in place.
"""

from __future__ import annotations

import torch


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of positions [start, end) of each request to ``out``, request after request."""
    spans = [req_to_token[row, a:b] for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)]
    slots = torch.cat(spans)
    out[: len(slots)] = slots.to(out.dtype)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    pool_len: int,
) -> None:
    """Give positions [start, end) of each request the next of ``slots``; ``req_to_token`` is written."""
    used = 0
    for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, a:b] = slots[used : used + b - a].to(req_to_token.dtype)
        used += b - a


def fill_accept_out_cache_loc_cpu(accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Write the slots of accepted tokens to ``out``, without gaps; -1 in ``accepted`` is nothing."""
    found = slots[accepted.flatten()[accepted.flatten() >= 0].long()]
    out[: len(found)] = found


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root while a child is what the model says; the first three arguments are written."""
    predicted = target_predict.flatten().tolist()
    for request in range(len(candidates)):
        tokens, index, child, sibling = (
            x[request].tolist() for x in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
        )
        node, accepted = 0, 0
        accept_index[request, 0] = index[0]
        while True:
            predicts[index[node]] = predicted[index[node]]
            candidate = child[node] if accepted + 1 < accept_index.shape[1] else -1
            while candidate != -1 and tokens[candidate] != predicted[index[node]]:
                candidate = sibling[candidate]
            if candidate == -1:
                break
            node, accepted = candidate, accepted + 1
            accept_index[request, accepted] = index[node]
        accept_token_num[request] = accepted
