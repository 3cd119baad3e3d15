"""QuaRot: the plain Walsh-Hadamard rotation, which knows no data."""

from __future__ import annotations

from functools import partial

from accuracy.calibration import Calibration
from accuracy.methods.base import RowMethod, shared
from oscar_rotation.math.hadamard import sylvester_hadamard


class QuaRot(RowMethod):
    """H on keys after RoPE and on values; 2-bit rows, clipping and windows as the server's ``hadamard`` recipe."""

    source = "Ashkboos et al. 2024 (arXiv 2404.00456), with the windows and clipping of OSCAR"

    def __init__(self, group: int, windows: bool = True) -> None:
        self.group = group
        self.name = f"QuaRot-INT2 g{group}" + ("" if windows else " bare")
        if not windows:
            self.sink = self.recent = 0
            self.k_clip = self.v_clip = 1.0
            self.source = "Ashkboos et al. 2024, rotation alone as in OSCAR, table 2"

    def fit(self, calibration: Calibration) -> None:
        """Only the width is needed."""
        self.key = self.value = shared(sylvester_hadamard(calibration.head_dim), calibration)


METHODS = [partial(QuaRot, 128), partial(QuaRot, 64), partial(QuaRot, 128, windows=False)]
