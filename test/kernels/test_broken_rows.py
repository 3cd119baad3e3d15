"""Rows of NaN become zeros, and the host learns which they were."""

from __future__ import annotations

import pytest
import torch

from oscar_kernels.triton.broken_rows import zero_broken_rows_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Of a graph's padded buffer."""
    buffer = torch.randn(7, 3000, device=device).to(dtype)
    x = buffer[:5, :2500]
    x[1] = x[4] = float("nan")
    want = buffer.clone()
    want[1, :2500] = want[4, :2500] = 0
    first = zero_broken_rows_(x)
    assert first.isnan().tolist() == [False, True, False, False, True]
    assert torch.equal(buffer, want)
