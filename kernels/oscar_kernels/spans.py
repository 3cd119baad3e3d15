"""Which cached tokens go into a copy, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Spans(NamedTuple):
    """Runs of positions that lie one after the other in a copy.

    Args:
        requests: int32 [spans], request of each, on the device like the next two.
        begins: int32 [spans], first position of each.
        indptr: int32 [spans + 1], first row of each in the copy, then the number of rows.
    """

    requests: torch.Tensor
    begins: torch.Tensor
    indptr: torch.Tensor
