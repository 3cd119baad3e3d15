"""OScaR (Occam's razor): rotate keys, scale every token to unit norm, then quantize per channel over tokens."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.kivi import Kivi, per_channel
from accuracy.quantizers import SIXTEEN, uniform, uniform_bits
from oscar_rotation.math.hadamard import sylvester_hadamard


class OmniTokenScaling(Kivi):
    """Canalized rotation (Hadamard) and omni-token scaling: group 32, residual 128.

    Keys: H, division by the token's norm (kept in 16 bits), 2 bits per channel over blocks of 32 tokens. Values: H,
    2 bits per token over groups of 32 channels. Without ``scaling`` it is the rotation alone, the paper's ablation;
    ``rotate=False`` scales without rotating, which the paper says must fail.
    """

    source = "Su et al. 2026 (arXiv 2605.19660), algorithm 1"
    block = 32
    residual = 128

    def __init__(self, rotate: bool = True, scaling: bool = True) -> None:
        super().__init__()
        self.rotate, self.scaling, self.recent = rotate, scaling, self.residual
        left_out = [label for label, on in (("rotation", rotate), ("scaling", scaling)) if not on]
        self.name = "OScaR g32" + "".join(f" w/o {label}" for label in left_out)

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        d = calibration.head_dim
        matrix = sylvester_hadamard(d) if self.rotate else torch.eye(d, dtype=torch.float64)
        self.rotation = matrix.float().to(calibration.device)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        y = k.float() @ self.rotation
        if not self.scaling:
            return per_channel(y, 0, self.block) @ self.rotation.T
        norm = y.norm(dim=-1, keepdim=True).clamp_min(1e-20).bfloat16().float()
        return norm * per_channel(y / norm, 0, self.block) @ self.rotation.T

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return uniform(v.float() @ self.rotation, self.bits, -1, self.block) @ self.rotation.T

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """The norm of a token is shared by its channels."""
        norm = SIXTEEN / head_dim if self.scaling else 0.0
        return uniform_bits(self.bits, self.block) + norm, uniform_bits(self.bits, self.block)


METHODS = [
    OmniTokenScaling,
    partial(OmniTokenScaling, scaling=False),
    partial(OmniTokenScaling, rotate=False),
]
