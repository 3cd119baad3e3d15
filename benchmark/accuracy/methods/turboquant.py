"""TurboQuant: a random rotation, then the best scalar quantizer of what it leaves, which is nearly normal."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method
from accuracy.quantizers import SIXTEEN, lloyd_max_round, uniform, uniform_bits

SEED = 20250428


def haar(d: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix, uniform over the group: float32 [d, d]."""
    gauss = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    return (q * r.diagonal().sign()).float()


class TurboQuantMse(Method):
    """As vLLM serves it: keys by Lloyd-Max levels with norm and a norm correction, values uniform with a zero point.

    Keys: x = norm * u; u R is read off ``bits`` levels of N(0, 1/d); the result is scaled to the exact norm.
    """

    source = "Zandieh et al. 2025 (arXiv 2504.19874), Q_mse; serving variant of vLLM pull request 38479"
    sink = recent = 0

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"TurboQuant K{bits}V{bits}"

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        self.rotation = haar(calibration.head_dim, SEED).to(calibration.device)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        d = k.shape[-1]
        norm = k.float().norm(dim=-1, keepdim=True).clamp_min(1e-20)
        levels = lloyd_max_round(k.float() / norm @ self.rotation * d**0.5, self.bits)
        correction = (norm / levels.norm(dim=-1, keepdim=True)).bfloat16().float()
        return levels * correction @ self.rotation.T

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return uniform(v.float() @ self.rotation, self.bits, -1, v.shape[-1]) @ self.rotation.T

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Norm and correction for keys, scale and zero point for values."""
        return self.bits + 2 * SIXTEEN / head_dim, uniform_bits(self.bits, head_dim)


class TurboQuantProd(Method):
    """The paper's unbiased variant: ``bits`` - 1 Lloyd-Max bits and the signs of a Gaussian sketch of the rest (QJL).

    x = norm * u; u is coded with one bit less; of the residual r the signs of r S^T and |r| are kept, and
    sqrt(pi/2) / d |r| sign(r S^T) S has an unbiased inner product with every query. Values use Q_mse.
    """

    source = "Zandieh et al. 2025 (arXiv 2504.19874), Q_prod for keys and Q_mse for values"
    sink = recent = 0

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"TurboQuant-QJL K{bits}V{bits}"

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        d = calibration.head_dim
        self.rotation = haar(d, SEED).to(calibration.device)
        generator = torch.Generator().manual_seed(SEED + 1)
        self.sketch = torch.randn(d, d, generator=generator).to(calibration.device)

    def _mse(self, x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = x.float().norm(dim=-1, keepdim=True).clamp_min(1e-20).bfloat16().float()
        unit = x.float() / norm
        d = x.shape[-1]
        return norm, lloyd_max_round(unit @ self.rotation * d**0.5, bits) @ self.rotation.T * d**-0.5

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        norm, coarse = self._mse(k, self.bits - 1)
        rest = k.float() / norm - coarse
        size = rest.norm(dim=-1, keepdim=True).bfloat16().float()
        signs = (rest @ self.sketch.T).sign()
        return norm * (coarse + (torch.pi / 2) ** 0.5 / k.shape[-1] * size * (signs @ self.sketch))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        norm, unit = self._mse(v, self.bits)
        return norm * unit

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Two norms for a key, one for a value."""
        return self.bits + 2 * SIXTEEN / head_dim, self.bits + SIXTEEN / head_dim


METHODS = [
    partial(TurboQuantMse, 3),
    partial(TurboQuantMse, 4),
    partial(TurboQuantProd, 3),
    partial(TurboQuantProd, 4),
]
