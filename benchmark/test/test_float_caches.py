"""FP8 and NVFP4: the grids of the formats, and what their scales do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods.fp8 import E4M3_MAX, Fp8, e4m3  # noqa: E402
from accuracy.methods.nvfp4 import BLOCK, LEVELS, Nvfp4, e2m1, nvfp4  # noqa: E402

D, HEADS = 64, 2


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def calibration(size: float) -> Calibration:
    x = size * normal(50, HEADS, D)
    return Calibration([LayerActivations(x, x, 2 * x)], [50], [torch.eye(D).expand(HEADS, -1, -1)], None)  # type: ignore[arg-type]


def test_fp8_is_torchs_cast_and_saturates() -> None:
    x = 40 * normal(1000, 64)
    assert torch.equal(e4m3(x), x.to(torch.float8_e4m3fn).float())
    assert e4m3(torch.tensor([-1000.0, 449.0])).tolist() == [-E4M3_MAX, E4M3_MAX]


def test_fp8_gives_back_all_values_of_the_format() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()]
    assert len(values) == 254
    assert torch.equal(e4m3(values), values)


def test_fp8_calibrated_scale_uses_the_range() -> None:
    """Beyond 448 a scale of 1 cuts off; below 2^-9 it rounds to zero; a calibrated one does neither."""
    for size in (1e4, 1e-4):
        plain, scaled = Fp8(), Fp8(calibrated=True)
        known = calibration(size)
        x = size * normal(1, HEADS, 50, D)
        errors = []
        for method in (plain, scaled):
            method.fit(known)
            errors.append(float((method.keys(0, x) - x).square().mean()) / size**2)
        assert errors[0] > 0.1
        assert errors[1] < 2e-3
    assert Fp8().bits_per_element(D) == 8


def test_e2m1_grid_and_ties_to_even() -> None:
    """Against a search of all levels; ties as round-to-nearest-even has them."""
    x = torch.linspace(-8, 8, 4001)
    distance = (x.abs().clamp_max(6)[:, None] - LEVELS).abs()
    found = e2m1(x)
    assert torch.equal((x.abs().clamp_max(6) - found.abs()).abs(), distance.amin(1))
    assert bool((found.signbit() == x.signbit()).all())
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    assert e2m1(torch.tensor([*ties])).tolist() == [*ties.values()]
    assert e2m1(-torch.tensor([*ties])).tolist() == [-x for x in ties.values()]


def test_nvfp4_gives_back_what_it_can_represent() -> None:
    """Blocks that hold a 6, times an E4M3 scale, times the tensor's scale."""
    codes = LEVELS[torch.randint(8, (40, 4, BLOCK), generator=torch.Generator().manual_seed(2))]
    codes = codes * torch.randint(2, codes.shape, generator=torch.Generator().manual_seed(3)).mul(2).sub(1)
    codes[..., 0] = 6.0
    scales = e4m3(normal(40, 4, 1).abs().clamp_min(0.1))
    x = (codes * scales * 0.125).flatten(-2)
    assert torch.equal(nvfp4(x, 0.125), x)


def test_nvfp4_block_does_not_feel_its_neighbours() -> None:
    x = normal(100, D)
    large = x.clone()
    large[:, :BLOCK] *= 100
    assert torch.equal(nvfp4(large, 0.01)[:, BLOCK:], nvfp4(x, 0.01)[:, BLOCK:])
    assert not nvfp4(torch.full((2, D), 1e-12), 1.0).any()


def test_nvfp4_of_a_layer() -> None:
    """4.5 bits, and an error between those of four and of five uniform bits of normal data; scales are of a side."""
    method = Nvfp4()
    method.fit(calibration(3.0))
    assert method.scales[0][1] == pytest.approx(2 * method.scales[0][0])
    assert method.bits_per_element(D) == 4.5
    x = 3 * normal(1, HEADS, 500, D, seed=7)
    for coded in (method.keys(0, x), method.values(0, x)):
        assert 0.005 < float((coded - x).square().sum() / x.square().sum()) < 0.012
