"""Heads whose channels are no power of two, such as 192: tiles are, so the rest of a tile does not exist."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def padded(head_dim):
    """Channels of a tile that holds heads: tiles are powers of two.

    Not by ``triton.next_power_of_2``: SGLang replaces it with a function that no kernel may call.
    """
    return 1 << (head_dim - 1).bit_length()


@triton.jit
def channel_mask(rows, D: tl.constexpr):
    """Which numbers of a tile of heads exist: the mask of its rows, and where it is padded that of its channels."""
    P: tl.constexpr = padded(D)
    if P == D:
        return rows[:, None]
    else:
        return rows[:, None] & (tl.arange(0, P) < D)[None, :]
