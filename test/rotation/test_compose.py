"""R = U H P in both eigenvector orders, and the eigenbasis it starts from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_rotation.math.compose import r_h_pbr
from oscar_rotation.math.eigenbasis import EigenOrder, eigenbasis
from oscar_rotation.math.hadamard import bit_reversal, sylvester_hadamard
from oscar_rotation.recipes import BUILT_IN

ORDERS: tuple[EigenOrder, ...] = ("ascending", "descending")
seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=25)


def random_covariance(d: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * d, d, generator=generator, dtype=torch.float64) * torch.logspace(0, 1, d, dtype=torch.float64)
    return x.T @ x / (4 * d)


@quick
@given(st.integers(0, 8), seeds, st.sampled_from(ORDERS))
def test_rotation_is_orthogonal_and_equalizes_importance(exponent: int, seed: int, order: EigenOrder) -> None:
    d = 2**exponent
    covariance = random_covariance(d, seed)
    eigenvalues, vectors = eigenbasis(covariance, order)
    rotation = r_h_pbr(vectors, eigenvalues)
    assert torch.allclose(rotation.T @ rotation, torch.eye(d, dtype=torch.float64), atol=1e-12)
    importance = (rotation.T @ covariance @ rotation).diagonal()
    assert torch.allclose(importance, importance.mean().expand(d), rtol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_eigenbasis_diagonalizes_in_the_stated_order(order: EigenOrder) -> None:
    covariance = random_covariance(64, 3)
    eigenvalues, vectors = eigenbasis(covariance, order)
    assert torch.allclose(vectors.T @ covariance @ vectors, torch.diag(eigenvalues), atol=1e-9)
    assert torch.equal(eigenvalues, eigenvalues.sort(descending=order == "descending").values)


def test_ascending_order_is_that_of_eigh() -> None:
    covariance = random_covariance(32, 4)
    eigenvalues, vectors = eigenbasis(covariance)
    reference = torch.linalg.eigh(covariance)
    assert torch.allclose(eigenvalues, reference.eigenvalues)
    assert torch.allclose((vectors.T @ reference.eigenvectors).abs(), torch.eye(32, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_the_largest_entry_of_an_eigenvector_is_positive(order: EigenOrder) -> None:
    _, vectors = eigenbasis(random_covariance(64, 5), order)
    assert bool((vectors.amax(0) == vectors.abs().amax(0)).all())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("order", "energy"), [("ascending", "least"), ("descending", "largest")])
def test_directions_that_are_constant_within_groups(order: EigenOrder, energy: str, group: int) -> None:
    # The first d/G columns of U are what a group's zero point absorbs: the least or the most energetic directions.
    covariance = random_covariance(128, 6)
    eigenvalues, vectors = eigenbasis(covariance, order)
    rotated = vectors.T @ r_h_pbr(vectors, eigenvalues)
    spread = rotated.view(128, -1, group)
    constant = (spread.amax(-1) - spread.amin(-1)).amax(-1) < 1e-12
    ranked = eigenvalues.argsort(descending=energy == "largest")
    assert set(constant.nonzero().flatten().tolist()) == set(ranked[: 128 // group].tolist())


def test_output_channels_by_order() -> None:
    # y[bitrev(i)] is channel i of x U H where eigenvalues descend, channel d-1-i where they ascend.
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    unpermuted = x @ sylvester_hadamard(64)
    unit = torch.eye(64, dtype=torch.float64)
    reversal = bit_reversal(64)
    descending = x @ r_h_pbr(unit, torch.arange(64, 0, -1).double())
    ascending = x @ r_h_pbr(unit, torch.arange(64).double())
    assert torch.allclose(descending, unpermuted[reversal])
    assert torch.allclose(ascending, unpermuted.flip(0)[reversal])


def test_recipes() -> None:
    assert torch.equal(BUILT_IN["identity"].matrix(48), torch.eye(48, dtype=torch.float64))
    assert torch.equal(BUILT_IN["hadamard"].matrix(64), sylvester_hadamard(64))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        eigenbasis(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="NaN"):
        eigenbasis(torch.full((4, 4), float("nan")))
    with pytest.raises(ValueError, match="order must be one of ascending, descending"):
        eigenbasis(torch.eye(4), "sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"need eigenvectors \[8, 8\]"):
        r_h_pbr(torch.eye(4), torch.ones(8))
