"""Which kernel stores the tokens of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.codebook import Codebook
from sglang_oscar.attention import gpu

POINTS = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
SHARED = Codebook.from_shared(POINTS, torch.ones(2, 16))
OWN = Codebook.from_points(torch.randn(2, 16, 256, 4, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("book", "tokens", "kernel"),
    [
        (None, 128, "cuda"),
        (None, 129, "triton"),
        (OWN, 129, "triton"),
        (SHARED, 129, "cuda"),
        (SHARED, 512, "cuda"),
        (SHARED, 513, "triton"),
    ],
)
def test_larger_steps_are_triton_s(
    book: Codebook | None, tokens: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where it is faster, which with a shared codebook is further out."""
    called: list[str] = []

    def storing(name: str) -> Any:
        return lambda *given, **named: called.append(name) or torch.empty(0)

    monkeypatch.setattr(gpu, "store", storing("triton"))
    monkeypatch.setattr(gpu.cuda_store, "store", storing("cuda"))
    made: Any = gpu.GpuKernels.__new__(gpu.GpuKernels)
    layer: Any = SimpleNamespace(cache=SimpleNamespace(k_codebook=book))
    made._prepared, made._arranged = {id(layer): None}, {id(layer): object()}
    made._page_size = 64
    call: Any = SimpleNamespace(q=torch.empty(tokens, 1, 1), k=None, v=None)
    made._store(layer, SimpleNamespace(slots=None), call)
    assert called == [kernel]
