"""The published recipe with a rotation for each kv head: what it gains where heads look in different directions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods.oscar import Oscar  # noqa: E402

D, HEADS, TOKENS = 64, 2, 600


def calibration(alike: bool) -> Calibration:
    """Two kv heads whose queries are read along a basis of their own, or along a common one."""
    generator = torch.Generator().manual_seed(1)
    bases = [torch.linalg.qr(torch.randn(D, D, generator=generator))[0] for _ in range(HEADS)]
    bases = [bases[0 if alike else head] for head in range(HEADS)]
    sizes = torch.logspace(-1, 1, D)
    q = torch.stack([torch.randn(TOKENS, D, generator=generator) * sizes @ basis for basis in bases], 1)
    k = torch.stack([torch.randn(TOKENS, D, generator=generator) * (1 / sizes) @ basis for basis in bases], 1)
    return Calibration([LayerActivations(q, k, k)], [TOKENS], [torch.eye(D).expand(HEADS, -1, -1)], None)  # type: ignore[arg-type]


def logit_error(per_head: bool, known: Calibration) -> float:
    method = Oscar(label="test", per_head=per_head)
    method.fit(known)
    layer = known.layers[0]
    x = layer.k.transpose(0, 1)[None]
    back = method.keys(0, x)
    return float(((back - x)[0] @ layer.q.permute(1, 2, 0)).square().mean())


def test_heads_that_differ_want_rotations_of_their_own() -> None:
    assert logit_error(True, calibration(alike=False)) < 0.7 * logit_error(False, calibration(alike=False))
    assert logit_error(True, calibration(alike=True)) > 0.8 * logit_error(False, calibration(alike=True))


def test_every_head_has_an_orthogonal_matrix() -> None:
    method = Oscar(label="test", per_head=True)
    method.fit(calibration(alike=False))
    for side in (method.key.forward, method.value.forward):
        assert side.shape == (1, HEADS, D, D)
        torch.testing.assert_close(side @ side.mT, torch.eye(D).expand_as(side), atol=1e-5, rtol=0)
        assert float((side[0, 0] - side[0, 1]).abs().max()) > 0.01
