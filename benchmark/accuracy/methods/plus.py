"""The recipe ``plus``: centered keys, balanced transforms, the server's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import RowMethod, Transforms
from oscar_rotation.balanced import balance
from oscar_rotation.covariance import ScoreValueCovariance
from oscar_rotation.eigenbasis import eigenbasis
from oscar_rotation.fit_options import FitOptions
from oscar_rotation.hadamard import bit_reversal_matrix, sylvester_hadamard
from oscar_rotation.layer_fit import compose_side
from oscar_rotation.plus_fit import Moments


@dataclass
class Plus(RowMethod):
    """See :mod:`oscar_rotation.balanced`. Each part can be left out, which the report does.

    Attributes:
        keys_by: "balance"; "zero_point", which keeps keys orthogonal and gives the d/G group-constant Walsh rows to
            the directions of largest key energy; or "paper".
        values_by: "balance" or "paper".
        centered: whether keys lose their calibration mean.
    """

    label: str = ""
    group: int = 128
    keys_by: str = "balance"
    values_by: str = "balance"
    centered: bool = True
    k_clip: float = 0.96
    v_clip: float = 0.92
    sink: int = 64
    recent: int = 256
    table: str = "methods"
    source: str = "this project; see rotation/oscar_rotation/balanced.py"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"plus g{self.group}" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Transforms of all layers."""
        pairs, centers = [], []
        for layer, x in enumerate(calibration.layers):
            moments = Moments(calibration.kv_heads, calibration.head_dim, calibration.device)
            moments.update(x.q, x.k, x.v, calibration.seq_lens)
            pairs.append((self._keys(moments), self._values(calibration, layer, moments)))
            centers.append(moments.center.float().to(calibration.device))
        device = calibration.device
        self.key, self.value = (
            Transforms(*(torch.stack([pair[side][n] for pair in pairs]).float().to(device) for n in (0, 1)))
            for side in (0, 1)
        )
        if self.centered:
            self.key.center = torch.stack(centers)

    def _keys(self, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
        stored, reading = moments.stored_keys(self.centered), moments.queries.shared().cpu()
        if self.keys_by == "balance":
            found = balance(stored, reading)
            return found.transform, found.dual.mT
        if self.keys_by == "zero_point":
            rotation = zero_point_order(stored, reading, max(1, len(stored) // self.group))
        else:
            rotation = compose_side(reading, FitOptions())[0]
        return rotation, rotation.mT

    def _values(self, calibration: Calibration, layer: int, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
        if self.values_by == "paper":
            rotation = compose_side(calibration.covariance(layer, ScoreValueCovariance).shared(), FitOptions())[0]
            return rotation, rotation.mT
        found = balance(moments.values.shared(), calibration.readers[layer].mean(0))
        return found.transform, found.dual.mT


def zero_point_order(stored: torch.Tensor, reading: torch.Tensor, free: int) -> torch.Tensor:
    """An orthogonal alternative: the ``free`` directions of largest key energy on the group-constant Walsh rows, the
    eigenvectors of C_Q on their complement, ascending, on the others. float64 [d, d]."""
    d = stored.shape[0]
    _, by_energy = eigenbasis(stored, "descending")
    top, rest = by_energy[:, :free], by_energy[:, free:]
    _, inner = eigenbasis(rest.mT @ reading.double() @ rest, "ascending")
    return torch.cat([top, rest @ inner], 1) @ sylvester_hadamard(d) @ bit_reversal_matrix(d)


def part(label: str, **changes: object) -> Callable[[], Plus]:
    """The recipe with parts left out or replaced."""
    return partial(Plus, label=label, table="plus", **changes)  # type: ignore[arg-type]


METHODS = [
    partial(Plus, group=128),
    partial(Plus, group=64),
    part("paper values", values_by="paper"),
    part("paper keys", keys_by="paper", centered=False),
    part("not centered", centered=False),
    part("zero-point order, not centered", keys_by="zero_point", values_by="paper", centered=False),
    part("zero-point order", keys_by="zero_point", values_by="paper"),
    part("centered only", keys_by="paper", values_by="paper"),
    part("clip 0.92/0.92", k_clip=0.92),
    part("clip 0.98/0.96", k_clip=0.98, v_clip=0.96),
    part("clip 0.96/0.88", v_clip=0.88),
]
