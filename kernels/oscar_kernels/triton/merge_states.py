"""Two attention results over different keys into the one over both, by their log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oscar_kernels.triton.arith import narrow

BLOCK = 16
"""(token, head) pairs per program."""


@triton.jit(do_not_specialize=["count"])
def _merge_states_kernel(out_ptr, lse_ptr, part_ptr, part_lse_ptr, count, D: tl.constexpr, BLOCK: tl.constexpr):
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = vector < count
    ours = tl.load(lse_ptr + vector, mask=mask, other=float("-inf"))
    theirs = tl.load(part_lse_ptr + vector, mask=mask, other=float("-inf"))
    top = tl.maximum(ours, theirs)
    top = tl.where(top == float("-inf"), 0.0, top)
    our_weight = tl.exp2(ours - top)
    their_weight = tl.exp2(theirs - top)
    total = our_weight + their_weight
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    at = vector[:, None] * D + tl.arange(0, D)[None, :]
    # A result over no keys is not looked at: it may hold anything. Ours is over a token's own chunk, which has keys;
    # FlashAttention says -inf where its sum is NaN, and then the result must be NaN, too.
    a = tl.load(out_ptr + at, mask=mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(part_ptr + at, mask=(mask & (their_weight > 0))[:, None], other=0.0).to(tl.float32)
    merged = a * (our_weight * inverse)[:, None] + b * (their_weight * inverse)[:, None]
    tl.store(out_ptr + at, narrow(merged, out_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(lse_ptr + vector, top + tl.log2(total), mask=mask)


def merge_states_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a partial attention result into another, in place.

    Args:
        out, part: [tokens, heads, head_dim] contiguous, of one 16-bit dtype; results over disjoint sets of keys.
            ``out`` is finite or NaN everywhere, ``part`` may hold anything where it is over no keys.
        lse, part_lse: float32 [tokens, heads] contiguous, log2 of the sum of exp2 of the logits (times log2 e); -inf
            for a result over no keys. ``out`` and ``lse`` take the result over both sets.

    Raises:
        ValueError: shapes, dtypes or strides are not these.
    """
    tensors = (out, lse, part, part_lse)
    if not all(x.is_contiguous() for x in tensors) or out.shape != part.shape or out.dtype != part.dtype:
        raise ValueError("results must be contiguous and alike")
    if any(x.shape != out.shape[:2] or x.dtype != torch.float32 for x in (lse, part_lse)):
        raise ValueError("log-sum-exps must be float32 [tokens, heads]")
    count, head_dim = lse.numel(), out.shape[2]
    if count:
        _merge_states_kernel[(triton.cdiv(count, BLOCK),)](
            out, lse, part, part_lse, count, D=head_dim, BLOCK=BLOCK, num_warps=4
        )
