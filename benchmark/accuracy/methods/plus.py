"""The recipe ``plus``: centered keys, balanced transforms, the server's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import RowMethod, Transforms
from oscar_rotation.balanced import balance
from oscar_rotation.covariance import QueryCovariance, ScoreValueCovariance
from oscar_rotation.eigenbasis import eigenbasis
from oscar_rotation.fit_options import FitOptions
from oscar_rotation.hadamard import bit_reversal_matrix, sylvester_hadamard
from oscar_rotation.layer_fit import compose_side

SINK = 64


def centered_moment(x: torch.Tensor, center: torch.Tensor | None) -> torch.Tensor:
    """Mean over tokens and heads of (x - center)^T (x - center): [tokens, heads, d] -> float64 [d, d]."""
    rest = (x if center is None else x - center).double().flatten(0, 1)
    return rest.mT @ rest / len(rest)


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
        layers = range(len(calibration.layers))
        centers = torch.stack([history(calibration, layer).mean(0) for layer in layers])
        center = centers if self.centered else None
        keys = [self._keys(calibration, layer, None if center is None else centers[layer]) for layer in layers]
        values = [self._values(calibration, layer) for layer in layers]
        device = calibration.device
        self.key = Transforms(*(torch.stack(part).float().to(device) for part in zip(*keys, strict=True)), center)
        self.value = Transforms(*(torch.stack(part).float().to(device) for part in zip(*values, strict=True)))

    def _keys(
        self, calibration: Calibration, layer: int, center: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reading = calibration.covariance(layer, QueryCovariance).shared().cpu()
        stored = centered_moment(history(calibration, layer), center).cpu()
        if self.keys_by == "balance":
            found = balance(stored, reading)
            return found.transform, found.dual.mT
        if self.keys_by == "zero_point":
            rotation = zero_point_order(stored, reading, max(1, calibration.head_dim // self.group))
        else:
            rotation = compose_side(reading, FitOptions())[0]
        return rotation, rotation.mT

    def _values(self, calibration: Calibration, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.values_by == "paper":
            rotation = compose_side(calibration.covariance(layer, ScoreValueCovariance).shared(), FitOptions())[0]
            return rotation, rotation.mT
        found = balance(centered_moment(calibration.layers[layer].v, None), calibration.readers[layer].mean(0))
        return found.transform, found.dual.mT


def history(calibration: Calibration, layer: int) -> torch.Tensor:
    """Keys behind the sink of every calibration sequence: [tokens, kv_heads, d]."""
    parts = calibration.layers[layer].k.split(calibration.seq_lens)
    return torch.cat([part[min(SINK, len(part) // 2) :] for part in parts])


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
