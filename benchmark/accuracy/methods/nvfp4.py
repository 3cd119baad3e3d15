"""NVFP4: four-bit floats, 16 of which share an E4M3 scale."""

from __future__ import annotations

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method
from accuracy.methods.fp8 import E4M3_MAX, e4m3

BLOCK = 16
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of E2M1, by code."""


def _thresholds() -> torch.Tensor:
    """Where one level ends and the next begins; a value that equals a threshold belongs to the level below."""
    middles = (LEVELS[1:] + LEVELS[:-1]) / 2
    # Ties go to the even code: above codes 1, 3 and 5 that is the next level.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(3))
    return middles


THRESHOLDS = _thresholds()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to the even code, +-6 beyond the range; float32."""
    codes = torch.bucketize(x.float().abs().contiguous(), THRESHOLDS.to(x.device))
    return LEVELS.to(x.device)[codes].copysign(x.float())


def nvfp4(x: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """Blocks of 16 channels: E2M1 codes times an E4M3 scale times ``tensor_scale``, and back.

    Args:
        x: [..., d], 16 divides d.
        tensor_scale: float32 factor of all blocks; blocks whose largest magnitude is beyond 6 * 448 times it saturate.

    Returns:
        float32 [..., d].
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = e4m3(blocks.abs().amax(-1, keepdim=True) / float(LEVELS[-1]) / tensor_scale) * tensor_scale
    # A block too small for any scale is stored as zeros.
    codes = e2m1(torch.where(scale > 0, blocks / scale, 0))
    return (codes * scale).flatten(-2)


class Nvfp4(Method):
    """Keys and values in NVFP4, no windows.

    The float32 scale of a layer's keys and of its values is that of calibration: its largest magnitude becomes 6 * 448.
    Assumed: a checkpoint that states such scales, as SGLang's ``kv_cache_dtype`` for it wants.
    """

    name = "NVFP4"
    source = "NVIDIA NVFP4: E2M1 elements, an E4M3 scale per 16, a float32 scale per tensor"
    sink = recent = 0

    def fit(self, calibration: Calibration) -> None:
        """Scales of all layers."""
        top = float(LEVELS[-1]) * E4M3_MAX
        self.scales = [
            [float(x.abs().max().clamp_min(1e-12)) / top for x in (layer.k, layer.v)] for layer in calibration.layers
        ]

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return nvfp4(k, self.scales[layer][0])

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return nvfp4(v, self.scales[layer][1])

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Four, and eight per block."""
        bits = 4 + 8 / BLOCK
        return bits, bits


METHODS = [Nvfp4]
