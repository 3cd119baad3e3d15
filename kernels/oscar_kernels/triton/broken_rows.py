"""Rows of logits that are NaN: a number of each row for the host, and zeros in their place before anything samples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["size", "stride"])
def _broken_rows_kernel(x_ptr, stride, first_ptr, size, BLOCK: tl.constexpr):
    """Grid (rows). Reads one number of a row, and writes to the row only if that is NaN."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x_ptr + row * stride).to(tl.float32)
    tl.store(first_ptr + row, first)
    if first != first:
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], tl.float32).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + row * stride + at, zero, mask=at < size)


def zero_broken_rows_(x: torch.Tensor) -> torch.Tensor:
    """Zero the rows whose first number is NaN.

    Args:
        x: [rows, size] with contiguous numbers, written in place.

    Returns:
        float32 [rows], the first numbers as they were.

    Raises:
        ValueError: numbers are not contiguous.
    """
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    first = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        _broken_rows_kernel[(len(x),)](x, x.stride(0), first, x.shape[1], BLOCK=BLOCK, num_warps=4)
    return first
