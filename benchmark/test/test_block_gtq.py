"""Block-GTQ: where the bits go, and that they go where they help."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods.block_gtq import LEAST_BITS, MOST_BITS, BlockGtq, allocate, pair_energy  # noqa: E402
from accuracy.methods.rotatekv import turned  # noqa: E402

D, HEADS, TOKENS = 64, 2, 400


def loss(energy: torch.Tensor, bits: torch.Tensor) -> float:
    return float((energy / 4.0 ** bits.double()).sum())


def test_allocation_is_optimal() -> None:
    """Against all allocations of five pairs with the same budget."""
    energy = torch.tensor([100.0, 7.0, 7.0, 0.3, 0.0])
    bits = allocate(energy, 2)
    assert int(bits.sum()) == 10
    everything = (torch.tensor(x) for x in itertools.product(range(1, 7), repeat=5) if sum(x) == 10)
    assert loss(energy, bits) == pytest.approx(min(loss(energy, x) for x in everything))
    assert bits.tolist() == sorted(bits.tolist(), reverse=True)


def test_allocation_is_even_for_equal_pairs_and_bounded() -> None:
    assert allocate(torch.ones(32), 3).tolist() == [3] * 32
    one = torch.zeros(32)
    one[7] = 1.0
    bits = allocate(one, 2)
    assert int(bits[7]) == MOST_BITS
    assert int(bits.min()) == LEAST_BITS
    assert int(bits.sum()) == 64
    with pytest.raises(ValueError, match="outside 1 to 8"):
        allocate(one, 9)


def test_energy_is_of_rotary_pairs() -> None:
    """It is the same before and after the rotary embedding."""
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(TOKENS)[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)
    tables = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
    torch.testing.assert_close(pair_energy(turned(x[None, None], *tables)[0, 0]), pair_energy(x))
    assert float(pair_energy(x).sum()) == pytest.approx(float(x.square().sum()) / TOKENS, rel=1e-5)


@pytest.fixture
def calibration() -> Calibration:
    """Two heads whose queries and keys are large in a few pairs of their own."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.ones(HEADS, D)
    for head, pairs in enumerate(([1, 2, 3], [20, 21])):
        sizes[head, pairs] = sizes[head, [D // 2 + n for n in pairs]] = 12.0
    k = torch.randn(TOKENS, HEADS, D, generator=generator) * sizes
    q = torch.randn(TOKENS, 2 * HEADS, D, generator=generator) * sizes.repeat_interleave(2, 0)
    return Calibration([LayerActivations(q, k, k)], [TOKENS], [torch.eye(D).expand(HEADS, -1, -1)], None)  # type: ignore[arg-type]


def test_logits_gain_from_the_allocation(calibration: Calibration) -> None:
    """At the same mean bits, logits are much nearer than with TurboQuant's two bits for every channel; each head has
    groups of its own, and bits count their norms."""
    method = BlockGtq(2, 2)
    method.fit(calibration)
    assert [sum(len(g.channels) * g.bits for g in groups) for groups in method.key_groups[0]] == [2 * D] * HEADS
    largest = [max(groups, key=lambda g: g.bits).channels.tolist() for groups in method.key_groups[0]]
    assert set(largest[0]) <= {1, 2, 3, 33, 34, 35}
    assert set(largest[1]) <= {20, 21, 52, 53}
    norms = sum(map(len, method.key_groups[0])) / HEADS
    assert method.stored_bits(D) == (2 + norms * 16 / D, 2 + 16 / D)
    layer = calibration.layers[0]
    x = layer.k.transpose(0, 1)[None]
    queries = layer.q.unflatten(1, (HEADS, 2)).permute(1, 0, 2, 3).flatten(1, 2)
    errors = [float(((back - x)[0] @ queries.mT).square().mean()) for back in (method.keys(0, x), method.values(0, x))]
    assert errors[0] < 0.4 * errors[1]


def test_norms_are_kept(calibration: Calibration) -> None:
    method = BlockGtq(3, 2, windows=True)
    method.fit(calibration)
    assert (method.sink, method.recent) == (64, 256)
    x = torch.randn(1, HEADS, 20, D, generator=torch.Generator().manual_seed(3))
    x[0, 0, 0] = 0
    for back in (method.keys(0, x), method.values(0, x)):
        torch.testing.assert_close(back.norm(dim=-1), x.norm(dim=-1), rtol=2e-3, atol=1e-6)
