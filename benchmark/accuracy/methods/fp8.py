"""FP8: every element in E4M3, with one scale per layer for keys and one for values."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method

E4M3_MAX = 448.0


def e4m3(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """``x`` divided by ``scale``, rounded to float8_e4m3fn (nearest, ties to even), and back; float32.

    Beyond +-448 it saturates; torch's own cast would give NaN.
    """
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


class Fp8(Method):
    """What SGLang stores with ``--kv-cache-dtype fp8_e4m3``, no windows.

    The scale is 1 where a checkpoint has none, which is what most servers run with, or the one that maps the largest
    magnitude of calibration to 448. Elements beyond the range saturate here, which an E4M3 cast on a GPU may or may
    not do.
    """

    source = "OCP 8-bit floating point, E4M3; SGLang 0.5.17, kv_cache_dtype fp8_e4m3"
    sink = recent = 0

    def __init__(self, calibrated: bool = False) -> None:
        self.calibrated = calibrated
        self.name = "FP8" + (", calibrated scale" if calibrated else "")

    def fit(self, calibration: Calibration) -> None:
        """Scales of all layers."""
        self.scales = [
            [float(x.abs().max().clamp_min(1e-12)) / E4M3_MAX if self.calibrated else 1.0 for x in (layer.k, layer.v)]
            for layer in calibration.layers
        ]

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return e4m3(k, self.scales[layer][0])

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return e4m3(v, self.scales[layer][1])

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Eight; a scale per layer is nothing."""
        return 8.0, 8.0


METHODS = [Fp8, partial(Fp8, calibrated=True)]
