"""A stock kernel's attention compared with torch's, once at start: on most GPUs it has never run here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_kernels.extend_plan import Ragged
from oscar_kernels.reference import LOG2_E

CASES = (([1, 200, 3], [70, 300, 0], False), ([1, 200, 3], [1, 200, 3], True), ([9, 130], [300, 131], True))
"""New tokens and keys of requests, and whether attention is causal: passes of prefixes, chunks, and both joined."""
TOLERANCE = 0.05
"""Of outputs and base-2 logarithms: 16 bits of numbers up to three."""


def differs(make: Callable[[], Ragged], q_heads: int, heads: tuple[int, int, int], like: torch.Tensor) -> str | None:
    """How far a kernel is from torch where that is too far; None where it is not.

    Args:
        make: the kernel.
        q_heads: of the model on this rank.
        heads: of keys and values there: how many, channels of a head of keys, and of values.
        like: a tensor of the device and the dtype of queries, keys and values.
    """
    generator, (kv_heads, head_dim, value_head_dim) = torch.Generator().manual_seed(0), heads
    for new, old, causal in CASES:
        starts, key_starts = (torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int() for lens in (new, old))
        shapes = ((sum(new), q_heads, head_dim), *((sum(old), kv_heads, d) for d in (head_dim, value_head_dim)))
        q, k, v = (torch.randn(*shape, generator=generator).to(like) for shape in shapes)
        kernel, sm_scale = make(), head_dim**-0.5
        kernel.plan(
            starts, key_starts, q_heads, kv_heads, head_dim, head_dim_vo=value_head_dim, causal=causal,
            q_data_type=like.dtype,
        )  # fmt: skip
        out, sums = kernel.forward_return_lse(q, k, v, causal=causal, sm_scale=sm_scale)
        alone = kernel.forward(q, k, v, causal=causal, sm_scale=sm_scale)
        wanted, wanted_sums = expected(q, k, v, starts.tolist(), key_starts.tolist(), causal, sm_scale)
        # Without keys the output does not count.
        some = wanted_sums.isfinite()
        pairs = (out[some], wanted[some]), (alone[some], wanted[some]), (sums[some], wanted_sums[some])
        worst = max(float((found.double() - right).abs().nan_to_num(torch.inf).max()) for found, right in pairs)
        if worst > TOLERANCE:
            return f"results differ by {worst:.2g} from torch's"
        if bool((sums[~some] != -torch.inf).any()):
            return "sums of no keys are not -inf"
    return None


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], key_starts: list[int], causal: bool,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of requests that lie one after the other, new tokens at the ends of keys.

    Returns:
        float64 [tokens, q_heads, head_dim], and [tokens, q_heads], the log2 of the sum of exp of the logits.
    """
    outs, sums = [], []
    for request in range(len(starts) - 1):
        own, keys = slice(*starts[request : request + 2]), slice(*key_starts[request : request + 2])
        groups = q.shape[1] // k.shape[1]
        cached, values = (x[keys].double().repeat_interleave(groups, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[own].double(), cached) * sm_scale
        if causal:
            new, old = logits.shape[1:]
            unseen = torch.ones(new, old, dtype=torch.bool, device=q.device).triu(1 + old - new)
            logits = logits.masked_fill(unseen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), values))
        sums.append(logits.logsumexp(-1).T * LOG2_E)
    return torch.cat(outs), torch.cat(sums)
