"""Hadamard matrix, bit reversal and P: the paper's worked example and properties for every power of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_rotation.math.compose import r_h_pbr
from oscar_rotation.math.hadamard import bit_reversal, hadamard, pbr_permutation, sylvester_hadamard

EXAMPLE = Path(__file__).parents[1] / "data" / "worked_example_layer10.json"
# The inputs are rounded to two decimals: a sum of 128 of them, each within 0.005, has this much play.
PRINTED = 0.0111

exponents = st.integers(0, 9)
seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=40)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    return content


def row(example: dict[str, Any], stage: str) -> torch.Tensor:
    return torch.tensor(example[stage], dtype=torch.float64)


def shuffled_spectrum(d: int, seed: int) -> torch.Tensor:
    return torch.randperm(d, generator=torch.Generator().manual_seed(seed)).double() + 1


@pytest.mark.parametrize(("before", "after"), [("k", "k_h"), ("k_u", "k_u_h")])
def test_worked_example_hadamard_stage(example: dict[str, Any], before: str, after: str) -> None:
    mixed = row(example, before) @ sylvester_hadamard(128)
    assert (mixed - row(example, after)).abs().max() <= PRINTED


def test_worked_example_permutation_stage_is_exact(example: dict[str, Any]) -> None:
    descending = torch.arange(128, 0, -1)
    assert torch.equal(row(example, "k_u_h") @ pbr_permutation(descending), row(example, "k_u_h_p"))


def test_worked_example_whole_rotation(example: dict[str, Any]) -> None:
    descending = torch.arange(128, 0, -1).double()
    rotated = row(example, "k_u") @ r_h_pbr(torch.eye(128, dtype=torch.float64), descending)
    assert (rotated - row(example, "k_u_h_p")).abs().max() <= PRINTED


@pytest.mark.parametrize("stage", ["k", "k_u", "k_u_h", "k_u_h_p", "k_h"])
def test_worked_example_group_ranges(example: dict[str, Any], stage: str) -> None:
    groups = row(example, stage).view(-1, example["group_size"])
    measured = groups.amax(1) - groups.amin(1)
    assert (measured - torch.tensor(example["group_range"][stage])).abs().max() <= 0.0101


@quick
@given(exponents)
def test_hadamard_is_orthogonal_and_flat(exponent: int) -> None:
    n = 2**exponent
    h = sylvester_hadamard(n)
    assert torch.allclose(h @ h.T, torch.eye(n, dtype=torch.float64), atol=1e-13)
    assert torch.equal(h, h.T)
    assert torch.unique(h.abs()).numel() == 1


@quick
@given(exponents, seeds)
def test_lemma_1_diagonal_is_constant(exponent: int, seed: int) -> None:
    n = 2**exponent
    spectrum = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e3
    h = sylvester_hadamard(n)
    diagonal = (h.T @ torch.diag(spectrum) @ h).diagonal()
    assert torch.allclose(diagonal, spectrum.mean().expand(n), rtol=1e-12)


def test_bit_reversal_of_eight() -> None:
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@quick
@given(exponents)
def test_bit_reversal_is_an_involution(exponent: int) -> None:
    order = bit_reversal(2**exponent)
    assert torch.equal(order[order], torch.arange(2**exponent))


@quick
@given(exponents, seeds)
def test_pbr_puts_the_ith_largest_at_bitrev_i(exponent: int, seed: int) -> None:
    d = 2**exponent
    eigenvalues = shuffled_spectrum(d, seed)
    moved = eigenvalues @ pbr_permutation(eigenvalues)
    assert torch.equal(moved[bit_reversal(d)], eigenvalues.sort(descending=True).values)


@quick
@given(exponents, seeds, st.data())
def test_pbr_spreads_the_leading_directions_over_the_groups(exponent: int, seed: int, data: st.DataObject) -> None:
    d = 2**exponent
    group = 2 ** data.draw(st.integers(0, exponent))
    eigenvalues = shuffled_spectrum(d, seed)
    leaders = eigenvalues.argsort(descending=True)[: d // group]
    positions = pbr_permutation(eigenvalues)[leaders].argmax(1)
    assert len(set((positions // group).tolist())) == d // group


@pytest.mark.parametrize("n", [0, 3, 80, 96, -4])
def test_sizes_that_are_not_powers_of_two_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got {n}"):
        sylvester_hadamard(n)
    if n == 96:
        return
    for make in (hadamard, bit_reversal):
        with pytest.raises(ValueError, match=f"power of two or 12 times one, got {n}"):
            make(n)


@pytest.mark.parametrize("n", [12, 24, 96, 192])
def test_twelve_times_a_power_of_two(n: int) -> None:
    """Symmetric, orthogonal, flat; what lies along the first direction shifts all channels alike."""
    h = hadamard(n)
    assert torch.allclose(h @ h, torch.eye(n, dtype=torch.float64), atol=1e-13)
    assert torch.equal(h, h.T)
    assert torch.equal((h * n**0.5).round().abs(), torch.ones(n, n, dtype=torch.float64))
    assert (h[0] > 0).all()
    assert torch.equal(hadamard(64), sylvester_hadamard(64))
    order = bit_reversal(n)
    assert torch.equal(order.sort().values, torch.arange(n))
    # Leading channels are dealt out: none of three groups has two more than another.
    counts = torch.bincount(bit_reversal(192)[:16] // 64, minlength=3)
    assert int(counts.max() - counts.min()) <= 1
    eigenvalues = shuffled_spectrum(n, 5)
    assert torch.equal((eigenvalues @ pbr_permutation(eigenvalues))[order], eigenvalues.sort(descending=True).values)
