"""Every method runs on every head_dim that is served, and on any number of heads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.attention import prefill_then_decode  # noqa: E402
from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402

SEQUENCES = [160, 224]
TOKENS = 400
GEOMETRIES = [(64, 3, 9), (64, 1, 1), (128, 1, 7), (128, 4, 4), (256, 2, 4), (256, 1, 16)]
"""head_dim, kv heads, query heads; 3 x 64 channels is what groups of 128 do not divide."""


def rotary(head_dim: int):
    def tables(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(n)[:, None] * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    return tables


def calibration(head_dim: int, kv_heads: int, q_heads: int) -> Calibration:
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    scales = torch.logspace(-0.5, 0.5, head_dim)

    def activations(heads: int) -> torch.Tensor:
        return torch.randn(sum(SEQUENCES), heads, head_dim, generator=generator) * scales + 0.2

    layer = LayerActivations(activations(q_heads), activations(kv_heads), activations(kv_heads))
    readers = torch.randn(kv_heads, head_dim, 2 * head_dim, generator=generator)
    return Calibration([layer], SEQUENCES, [readers @ readers.mT], rotary(head_dim))


@pytest.mark.parametrize(("head_dim", "kv_heads", "q_heads"), GEOMETRIES)
def test_every_method_on_every_geometry(head_dim: int, kv_heads: int, q_heads: int) -> None:
    """What is read back has the shape of what was stored and resembles it; bits and windows are stated."""
    known = calibration(head_dim, kv_heads, q_heads)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, kv_heads, TOKENS, head_dim, generator=generator) * torch.logspace(-0.5, 0.5, head_dim) + 0.2
    schedule = prefill_then_decode(TOKENS, 300)
    for name, method in all_methods().items():
        method.fit(known)
        for side, coded in (("keys", method.keys(0, x)), ("values", method.values(0, x))):
            assert coded.shape == x.shape, (name, side)
            assert coded.dtype == torch.float32, (name, side)
            assert bool(coded.isfinite().all()), (name, side)
            assert float((coded - x).square().sum() / x.square().sum()) < 2, (name, side)
        assert 2 <= method.bits_per_element(head_dim) <= 16, name
        view = method.view(schedule)
        for exact_from in (view.key_exact_from, view.value_exact_from):
            assert exact_from is None or exact_from.shape == (TOKENS,), name
