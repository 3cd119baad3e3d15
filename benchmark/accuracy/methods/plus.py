"""The recipe ``plus``: centered keys, balanced transforms, scales fitted to the codes, the server's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import RowMethod, Transforms
from oscar_rotation.fit.layer import compose_side
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.math.balanced import SHRINKAGE, balance, shrunk
from oscar_rotation.math.covariance import ScoreValueCovariance
from oscar_rotation.math.eigenbasis import eigenbasis
from oscar_rotation.math.hadamard import bit_reversal_matrix, sylvester_hadamard
from oscar_rotation.recipes.plus import CLIP_RATIO, KEY_GAIN, VALUE_GAIN, Moments


@dataclass
class Plus(RowMethod):
    """See :mod:`oscar_rotation.math.balanced` and :mod:`oscar_rotation.recipes.plus`. Each part can be left out, which
    the report does.

    Attributes:
        keys_by: "balance"; "zero_point", which keeps keys orthogonal and gives the d/G group-constant Walsh rows to
            the directions of largest key energy; or "paper".
        values_by: "balance" or "paper".
        centered: whether keys lose their calibration mean.
        shrinkage: of the second moments of keys and queries.
        per_head: a key transform for each kv head, which this recipe does not do.
        domain: calibration text.
        context: positions that keys may have; None for the model's, 0 for those of the calibration text alone.
        group, k_clip, v_clip, k_gain, v_gain, sink, recent: of the rows and windows.
    """

    label: str = ""
    group: int = 128
    keys_by: str = "balance"
    values_by: str = "balance"
    centered: bool = True
    shrinkage: float = SHRINKAGE
    per_head: bool = False
    domain: str = "retrieval"
    context: int | None = None
    k_clip: float = CLIP_RATIO
    v_clip: float = CLIP_RATIO
    k_gain: float = KEY_GAIN
    v_gain: float = VALUE_GAIN
    sink: int = 64
    recent: int = 256
    table: str = "methods"
    source: str = "this project; see rotation/oscar_rotation/recipes/plus.py"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"plus g{self.group}" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Transforms of all layers."""
        layers = range(len(calibration.layers))
        device = calibration.device
        self.key, self.value = (
            Transforms(*(torch.stack(maps).float().to(device) for maps in zip(*pairs, strict=True)))
            for pairs in ([self._keys(calibration, n) for n in layers], [self._values(calibration, n) for n in layers])
        )
        if self.centered:
            self.key.center = (
                torch.stack([moments(calibration, n).center(calibration.positions(self.context)) for n in layers])
                .float()
                .to(device)
            )

    def _keys(self, calibration: Calibration, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            known, positions = moments(calibration, layer), calibration.positions(self.context)
            both = (known.keys_by_head(self.centered, positions), known.queries_by_head(positions))
            if self.per_head:
                pairs = zip(*(shrunk(moment, self.shrinkage) for moment in both), strict=True)
                heads = [balance(stored, reading) for stored, reading in pairs]
                return torch.stack([head.transform for head in heads]), torch.stack([head.dual.mT for head in heads])
            stored, reading = (moment.mean(0) for moment in both)
            if self.keys_by == "balance":
                found = balance(shrunk(stored, self.shrinkage), shrunk(reading, self.shrinkage))
                return found.transform, found.dual.mT
            if self.keys_by == "zero_point":
                rotation = zero_point_order(stored, reading, max(1, len(stored) // self.group))
            else:
                rotation = compose_side(reading, FitOptions())[0]
            return rotation, rotation.mT

        choices = (self.keys_by, self.centered, self.shrinkage, self.per_head, self.group, self.context)
        return calibration.once((layer, "keys", *choices), compute)

    def _values(self, calibration: Calibration, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            if self.values_by == "paper":
                make = partial(ScoreValueCovariance, sinks=calibration.sink_logits(layer))
                size = (calibration.kv_heads, calibration.head_dim, calibration.device)
                moment = calibration.accumulated(layer, ScoreValueCovariance, lambda: make(*size))
                rotation = compose_side(moment.shared(), FitOptions())[0]
                return rotation, rotation.mT
            found = balance(moments(calibration, layer).values.shared(), calibration.readers[layer].mean(0))
            return found.transform, found.dual.mT

        return calibration.once((layer, "values", self.values_by), compute)


def moments(calibration: Calibration, layer: int) -> Moments:
    """What the transforms of a layer are made of."""
    size = (calibration.kv_heads, calibration.head_dim, calibration.head_dim, calibration.device)
    found: Moments = calibration.accumulated(layer, Moments, lambda: Moments(*size))
    return found


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


SEEN = {"context": 0}
"""Covariances of the positions of calibration text, as the published recipe has them."""
RANGE = {"k_gain": 0.0, "v_gain": 0.0, "k_clip": 0.96, "v_clip": 0.92}
"""Rows as the published recipe writes them."""

METHODS = [
    partial(Plus, group=128),
    partial(Plus, group=64),
    part("paper values", values_by="paper"),
    part("paper keys", keys_by="paper", centered=False, **SEEN),
    part("paper keys and values", keys_by="paper", values_by="paper", centered=False, **SEEN),
    part("not centered", centered=False),
    part("zero-point order", keys_by="zero_point", values_by="paper", **SEEN),
    part("centered only", keys_by="paper", values_by="paper", **SEEN),
    part("moments not shrunk", shrinkage=0.0),
    part("moments shrunk by a quarter", shrinkage=0.25),
    part("moments shrunk by three quarters", shrinkage=0.75),
    part("diagonal moments", shrinkage=1.0),
    part("keys balanced per head", per_head=True),
    part("positions of the calibration text alone", context=0),
    partial(Plus, group=64, label="positions of the calibration text alone", table="focus", context=0),
    partial(Plus, group=64, label="calibrated on all kinds", table="domains", domain="mixed"),
    partial(Plus, group=64, label="calibrated on descriptions", table="domains", domain="descriptions"),
    part("paper rows", **RANGE),
    part("paper rows, zero-point order", keys_by="zero_point", values_by="paper", **RANGE, **SEEN),
    part("paper rows, clip 0.88/0.88", k_gain=0.0, v_gain=0.0),
    part("key gain 1.00", k_gain=1.0),
    part("key gain 0.97", k_gain=0.97),
    part("key gain 0.96", k_gain=0.96),
    part("key gain 0.88 (about least squares)", k_gain=0.88),
    part("clip 0.84/0.84", k_clip=0.84, v_clip=0.84),
    part("clip 0.92/0.92", k_clip=0.92, v_clip=0.92),
]
