"""Products of BF16 matrices in the stand-in for sgl_kernel: float64's, rounded once, as PyTorch's own are."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from support import stand_in


@pytest.fixture
def products() -> ModuleType:
    return stand_in.module("products")


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a unit in the last place, and what float32 loses while it adds up."""
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-5).all()


@pytest.mark.parametrize("shape", [(1,), (3,), (70,), (2, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(products: ModuleType, shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*shape, 96).bfloat16(), torch.randn(40, 96).bfloat16(), torch.randn(40).bfloat16()
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert_rounded_once(products.linear(x, weight, bias if biased else None), exact)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_matmul(products: ModuleType, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(*batch, 70, 96).bfloat16(), torch.randn(*batch, 96, 40).bfloat16()
    out = torch.empty(*batch, 70, 40, dtype=torch.bfloat16)
    assert products.matmul(x, y, out=out) is out
    for found in (products.matmul(x, y), out):
        assert_rounded_once(found, x.double() @ y.double())


def test_other_types_are_pytorchs(products: ModuleType) -> None:
    x, y = torch.randn(70, 96), torch.randn(96, 40)
    assert torch.equal(products.linear(x, y.T), torch.nn.functional.linear(x, y.T))
    assert torch.equal(products.matmul(x.double(), y.double()), x.double() @ y.double())
