"""SGLang's Triton kernel, which verifies drafts in layers with a sliding window on a GPU, against the reference in
torch: chains, of requests shorter and longer than a window, with sink logits and NaN in slots that are nobody's."""

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from oscar_kernels.sliding_window import attend

WINDOW, NEW, HEADS, KV_HEADS, CHANNELS, SCALE = 20, 4, 4, 2, 64, 0.125
LENGTHS = (3, 19, 21, 57)
"""Tokens of requests before the new ones."""


def test_chains(device: torch.device) -> None:
    """The arguments are what SGLang's Triton backend passes: slots of windows, and a mask that has all tokens."""
    torch.manual_seed(0)
    buffers = torch.full((2, 256, KV_HEADS, CHANNELS), float("nan"), device=device)
    slots = (torch.randperm(255, device=device) + 1)[: sum(LENGTHS)].split(LENGTHS)
    for own in slots:
        buffers[:, own[-WINDOW:]] = torch.randn(2, len(own[-WINDOW:]), KV_HEADS, CHANNELS, device=device)
    q = torch.randn(len(LENGTHS) * NEW, HEADS, CHANNELS, device=device)
    k, v = torch.randn(2, len(LENGTHS) * NEW, KV_HEADS, CHANNELS, device=device)
    out, sinks = torch.empty_like(q), torch.randn(HEADS, device=device)
    chain = torch.ones(NEW, NEW, dtype=torch.bool, device=device).tril()
    masks = [torch.cat([chain.new_ones(NEW, length), chain], 1).flatten() for length in LENGTHS]
    kept = [own[-WINDOW:] for own in slots]

    def ends(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts], device=device).cumsum(0).int()

    extend_attention_fwd(
        q, k, v, out, *buffers, ends([NEW] * len(LENGTHS)), ends([len(own) for own in kept]), torch.cat(kept),
        torch.cat(masks), True, ends([len(mask) for mask in masks]), NEW, 1.0, 1.0, SCALE, sliding_window_size=WINDOW,
        sinks=sinks, window_kv_offsets=torch.tensor([max(length - WINDOW, 0) for length in LENGTHS], device=device),
    )  # fmt: skip
    for request, own in enumerate(kept):
        new = slice(request * NEW, (request + 1) * NEW)
        keys, values = (torch.cat([old[own], of[new]]) for old, of in zip(buffers, (k, v), strict=True))
        for mask in (None, chain):
            torch.testing.assert_close(out[new], attend(q[new], keys, values, SCALE, WINDOW, sinks, mask))


def test_trees_in_the_reference(device: torch.device) -> None:
    """A window ends at a token's depth: each token of a tree sees what it would see behind its ancestors alone."""
    parents = [-1, 0, 0, 1, 2, 4]
    tree = torch.eye(len(parents), dtype=torch.bool, device=device)
    for token, parent in enumerate(parents[1:], 1):
        tree[token] |= tree[parent]
    before = 31
    q = torch.randn(len(parents), HEADS, CHANNELS, device=device)
    k, v = torch.randn(2, before + len(parents), KV_HEADS, CHANNELS, device=device)
    out = attend(q, k, v, SCALE, WINDOW, None, tree)
    for token in range(len(parents)):
        path = torch.cat([torch.arange(before, device=device), before + tree[token].nonzero().flatten()])
        alone = attend(q[token : token + 1], k[path], v[path], SCALE, WINDOW)
        torch.testing.assert_close(out[token : token + 1], alone)
