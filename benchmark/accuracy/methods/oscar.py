"""OSCAR and every ablation of its tables 4 to 7, of the order of eigenvectors and of the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import RowMethod, Transforms
from accuracy.methods.turboquant import SEED, haar
from accuracy.quantizers import lloyd_max_round
from oscar_rotation.fit.layer import compose_side
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.targets import KEY_TARGETS, VALUE_TARGETS, TargetInputs
from oscar_rotation.math.covariance import ProxyValueCovariance, QueryCovariance
from oscar_rotation.recipes import BUILT_IN


@dataclass
class Oscar(RowMethod):
    """R = U H P of the covariance targets, clipping, 2-bit rows, windows.

    Attributes:
        label: what differs from the method; "" for the method itself.
        key_target, value_target, order, composition: as in :class:`oscar_rotation.fit.options.FitOptions`; the
            target "random" is a random rotation.
        group, k_clip, v_clip, k_gain, v_gain, sink, recent: of the rows and windows.
        sequences: calibration sequences used; 0 for all.
        domain: calibration text, one of the domains that the laboratory offers.
        rounding: replaces the codec's; None for the server's own.
        per_head: a rotation for each kv head instead of one per layer; for targets that calibration data fit.
        table: of the report.
    """

    label: str = ""
    key_target: str = "qqt"
    value_target: str = "sst"
    order: str = "ascending"
    composition: str = "r_h_pbr"
    group: int = 128
    k_clip: float = 0.96
    v_clip: float = 0.92
    k_gain: float = 0.0
    v_gain: float = 0.0
    sink: int = 64
    recent: int = 256
    sequences: int = 0
    domain: str = "retrieval"
    rounding: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    per_head: bool = False
    table: str = "methods"
    source: str = "Zhou et al. 2026 (arXiv 2605.17757)"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"OSCAR g{self.group}" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Rotations of all layers from the targets' covariances."""
        if self.sequences:
            calibration = calibration.first(self.sequences)
        layers = range(len(calibration.layers))
        self.key = Transforms.rotations(torch.stack([self._rotation(calibration, n, "k") for n in layers]))
        self.value = Transforms.rotations(torch.stack([self._rotation(calibration, n, "v") for n in layers]))

    def _rotation(self, calibration: Calibration, layer: int, side: str) -> torch.Tensor:
        target = self.key_target if side == "k" else self.value_target
        key = ("rotation", layer, side, target, self.order, self.composition, self.per_head)
        return calibration.once(key, lambda: self._fitted(calibration, layer, side))

    def _fitted(self, calibration: Calibration, layer: int, side: str) -> torch.Tensor:
        target = self.key_target if side == "k" else self.value_target
        d, device = calibration.head_dim, calibration.device
        if target == "random":
            return haar(d, SEED + 2 * layer + (side == "v")).to(device)
        if target in BUILT_IN:
            return BUILT_IN[target].matrix(d).float().to(device)
        inputs = TargetInputs(calibration.kv_heads, d, d, device, sinks=calibration.sink_logits(layer))
        if target == "proxy":
            queries = calibration.covariance(layer, QueryCovariance).per_head()
            accumulator = calibration.accumulated(layer, target, lambda: ProxyValueCovariance(queries, d, device))
        else:
            known = KEY_TARGETS if side == "k" else VALUE_TARGETS
            make = known[target].make
            assert make is not None
            accumulator = calibration.accumulated(layer, target, partial(make, inputs))
        options = FitOptions(order=self.order, composition=self.composition)  # type: ignore[arg-type]
        if self.per_head:
            heads = [compose_side(covariance, options)[0] for covariance in accumulator.per_head()]
            return torch.stack(heads).to(device)
        return compose_side(accumulator.shared(), options)[0].to(device)

    def coded(self, y: torch.Tensor, ratio: float, gain: float, levels: int = 4) -> torch.Tensor:
        """See :class:`RowMethod`."""
        return super().coded(y, ratio, gain, levels) if self.rounding is None else self.rounding(y, self.group)


def lloyd_max_rows(y: torch.Tensor, group: int) -> torch.Tensor:
    """Lloyd-Max levels around the group's mean, scaled by its standard deviation, both bfloat16: same bits.

    Args:
        y: [..., d].
        group: channels that share both; all d where there are fewer.

    Returns:
        float32 [..., d].
    """
    grouped = y.unflatten(-1, (-1, min(group, y.shape[-1])))
    mean = grouped.mean(-1, keepdim=True).bfloat16().float()
    deviation = (grouped - mean).square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8).bfloat16().float()
    return (mean + deviation * lloyd_max_round((grouped - mean) / deviation, 2)).flatten(-2)


def ablation(table: str, label: str, **changes: Any) -> Callable[[], Oscar]:
    """A variant of the method for one of the ablation tables."""
    return partial(Oscar, label=label, table=table, **changes)


WINDOWS = ((0, 0), (32, 128), (128, 512), (256, 1024))
CLIPS = (0.88, 0.92, 0.96, 0.98, 1.0)
METHODS = [
    partial(Oscar, group=128),
    partial(Oscar, group=64),
    partial(Oscar, group=32),
    partial(Oscar, group=128, label="per kv head", per_head=True),
    partial(Oscar, group=64, label="per kv head", per_head=True),
    ablation("factors", "K^T K / V^T V targets", key_target="ktk", value_target="vtv"),
    ablation("factors", "w/o P", composition="r_h"),
    ablation("factors", "w/o H", composition="pbr"),
    ablation("factors", "w/o U", composition="h_pbr"),
    ablation("factors", "no rotation", key_target="identity", value_target="identity"),
    ablation("factors", "random rotation", key_target="random", value_target="random"),
    ablation("factors", "H U P", composition="h_r_pbr"),
    ablation("factors", "K^T K / V^T V targets", key_target="ktk", value_target="vtv", group=64),
    ablation("factors", "w/o H", composition="pbr", group=64),
    ablation("factors", "no rotation", key_target="identity", value_target="identity", group=64),
    ablation("order", "descending", order="descending"),
    ablation("order", "descending", order="descending", group=64),
    ablation("order", "K^T K descending", key_target="ktk", order="descending"),
    ablation("targets", "per kv head", per_head=True, group=32),
    ablation("targets", "proxy C_S", value_target="proxy"),
    ablation("targets", "C_Q only", value_target="hadamard"),
    ablation("targets", "C_S only", key_target="hadamard"),
    ablation("targets", "Lloyd-Max levels", rounding=lloyd_max_rows),
    *(ablation("windows", f"windows {s}/{r}", sink=s, recent=r) for s, r in WINDOWS),
    *(
        ablation("clip", f"clip {k:.2f}/{v:.2f}", k_clip=k, v_clip=v)
        for k in CLIPS
        for v in CLIPS
        if (k, v) != (0.96, 0.92)
    ),
    *(ablation("calibration", f"{n}K tokens", sequences=n) for n in (1, 2, 4)),
    ablation("calibration", "source text", domain="text"),
]
