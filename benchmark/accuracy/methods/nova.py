"""NOVA-KV: keys in the eigenbasis of what queries see of them, fours of channels by codebooks; values as OSCAR."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Transforms
from accuracy.methods.oscar import Oscar
from accuracy.methods.plus import moments
from accuracy.methods.vector_keys import CHANNELS, VectorKeys
from oscar_rotation.math.balanced import root
from oscar_rotation.math.positions import Positions


@dataclass
class Nova(VectorKeys, Oscar):
    """The codec of NOVA-KV, written from its paper and the description of its program, no line of which is here.

    From the paper and github.com/Amir-zsh/nova-kv: a key less its mean is multiplied by C_Q^(1/2) V, with V the
    eigenvectors of C_Q^(1/2) Cov(K) C_Q^(1/2) by kv head (not orthogonal: squared errors behind it are those of the
    logits); channels are sorted into groups of four that each span all eigenvalues (channel r goes to group r modulo
    their number); a row over its root mean square is an index into 256 points per head and group, placed by k-means
    and held in e5m2 with a factor per book; one scale a token. Values are OSCAR's INT2, clip .92, groups of 128; the
    first 64 and the last 256 tokens are in 16 bits.

    Our reading: a scale has 16 bits, as the paper's 2.22 bits imply (the program's default is 32); k-means has 20
    rounds where the program has 25, on all tokens of calibration but the first 64 of a sequence where it has every
    fourth token; calibration text is the laboratory's.

    Attributes:
        context: positions that keys may have; 0 for those of the calibration text, as published; None for the model's.
    """

    context: int | None = 0
    float8 = torch.float8_e5m2
    source: str = "Fernandez-Menduina et al. 2026 (arXiv 2608.04074), github.com/Amir-zsh/nova-kv; see the class"

    def __post_init__(self) -> None:
        self.name = "NOVA-KV" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Values of OSCAR; transforms and books of keys."""
        super().fit(calibration)
        positions = calibration.positions(self.context)
        found = [self._key_side(calibration, n, positions) for n in range(len(calibration.layers))]
        forward, back, center = (torch.stack(x).float().to(calibration.device) for x in zip(*found, strict=True))
        self.key = Transforms(forward, back, center)
        self.fit_books(calibration, 0.0, self.context, by_energy=False)

    def _key_side(
        self, calibration: Calibration, layer: int, positions: Positions | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Transform, its inverse and the center of a layer by kv head."""
        known = moments(calibration, layer)
        stored, center = known.keys_by_head(positions=positions), known.center(positions)
        sides = [eigenbasis_of(*pair) for pair in zip(stored, known.queries_by_head(positions), strict=True)]
        return torch.stack([side[0] for side in sides]), torch.stack([side[1] for side in sides]), center


def eigenbasis_of(stored: torch.Tensor, reading: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The transform of one kv head and its inverse, float64 [d, d] each; columns in groups that span the spectrum.

    Args:
        stored: covariance of the keys, [d, d].
        reading: second moment of the queries, [d, d].
    """
    half = root(reading)
    _, vectors = torch.linalg.eigh(half @ stored.double().cpu() @ half)
    # Largest first, then every (d / 4)-th of them side by side.
    order = torch.arange(len(stored)).view(CHANNELS, -1).T.flatten()
    vectors = vectors.flip(1)[:, order]
    return half @ vectors, vectors.mT @ torch.linalg.inv(half)


METHODS = [Nova, partial(Nova, label="every position", context=None, table="codebooks")]
