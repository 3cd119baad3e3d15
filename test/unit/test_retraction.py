"""What is kept of a retracted request; without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_oscar.features.disaggregation import retraction


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_step_under_way_is_waited_for(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still write to the ring that is copied."""
    ring = torch.zeros(2, 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ring.fill_(7.0))
    side = SimpleNamespace(ring=SimpleNamespace(is_cuda=on_gpu), row_of_ring=lambda row: ring[row])
    pool: Any = SimpleNamespace(oscar_cache=SimpleNamespace(side=side))
    req = SimpleNamespace(req_pool_idx=1)
    retraction.before_offload(req, pool, None)
    ring.zero_()
    retraction.after_load(None, req, pool, None)
    assert ring[1].tolist() == [7.0 if on_gpu else 0.0] * 3
