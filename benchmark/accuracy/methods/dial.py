"""What ``oscar fit --bits`` writes: a recipe's transforms, and bits of a code by layer and side, of keys by kv head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method, RowMethod
from accuracy.methods.focus import ServedFocus
from accuracy.methods.plus import Plus
from oscar_kernels.layout import AFFINE, BITS, EXACT, WIDTHS
from oscar_rotation.dump import DumpChunk
from oscar_rotation.files.by_head import ByHead, flat
from oscar_rotation.fit.bit_goal import BitGoal, mean_bits
from oscar_rotation.fit.bits import from_two_bits, layer_losses
from oscar_rotation.fit.held_out import HELD_OUT_TOKENS, Request, moved, requests
from oscar_rotation.fit.model_losses import model_losses
from oscar_rotation.fit.samples import plan_samples
from oscar_rotation.fit.texts import TAIL
from oscar_rotation.recipes.plus import KEY_ROWS, VALUE_ROWS
from oscar_rotation.threads import one_thread


@dataclass
class Dial(Method):
    """See :mod:`oscar_rotation.fit.bits`.

    Attributes:
        make: the recipe at two bits.
        goal: as the command takes it.
        by_model: whether the model says what bits cost, on the calibration text (``--text``).
        sink, recent, table: as of :class:`Method`.
        bits: of keys and of values, by layer, or by kv head of one; set by fit.
    """

    make: Callable[[], RowMethod]
    goal: str
    by_model: bool = False
    by_token: ClassVar[bool] = True
    sink: int = 64
    recent: int = 256
    table: str = "bits"
    source: str = "this project; see rotation/oscar_rotation/fit/bits.py"
    name: str = field(init=False)
    domain: str = field(init=False)
    bits: tuple[tuple[ByHead[int], ...], tuple[ByHead[int], ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.make()
        self.domain = getattr(self.base, "domain", "retrieval")
        self.name = f"{self.base.name}, --bits {self.goal}" + (", by the model" if self.by_model else "")

    def fit(self, calibration: Calibration) -> None:
        """The recipe, then the bits."""
        self.base.fit(calibration)
        layers, goal = len(calibration.layers), BitGoal.parse(self.goal)
        if goal.mean is None:
            assert goal.key is not None
            assert goal.value is not None
            self.bits = (goal.key,) * layers, (goal.value,) * layers
            return
        losses = calibration.once(("bit losses", self.base.name), lambda: self._losses(calibration))
        if self.by_model:
            two = calibration.once(("model losses", self.base.name), lambda: self._of_model(calibration))
            losses = from_two_bits(two, losses)
        plan = goal.choices(losses.flatten(0, 1), calibration.head_dim, self.base.group)
        widths = tuple(width for width, _ in plan)
        self.bits = widths[::2], widths[1::2]

    def _losses(self, calibration: Calibration) -> torch.Tensor:
        positions = calibration.positions(getattr(self.base, "context", None))
        found = []
        for layer, x in enumerate(calibration.layers):
            chunk = DumpChunk(x.q, x.k, x.v, tuple(calibration.seq_lens))
            first = plan_samples({0: chunk.seq_lens}, HELD_OUT_TOKENS)[0]
            later = list(requests(chunk.split(first)[1], calibration.sink_logits(layer)))
            held_out: list[Request] = moved(later, positions)
            sides = partial(self._key, layer), partial(self._value, layer)
            with one_thread():
                found.append(layer_losses(held_out, *sides, calibration.head_dim**-0.5, calibration.readers[layer]))
        return torch.stack(found)

    def _of_model(self, calibration: Calibration) -> torch.Tensor:
        assert calibration.ids is not None
        layers = range(len(calibration.layers))
        reads = [(partial(self._key, n, bits=BITS[0]), partial(self._value, n, bits=BITS[0])) for n in layers]
        positions = calibration.positions(getattr(self.base, "context", None))
        return model_losses(calibration.model, calibration.ids, reads, TAIL, positions)

    def _key(self, layer: int, k: torch.Tensor, bits: ByHead[int]) -> torch.Tensor:
        """Keys [..., kv_heads, n, head_dim] as codes of so many bits give them back."""
        if isinstance(bits, tuple):
            read = {width: self._key(layer, k, width) for width in set(bits)}
            return torch.stack([read[width].select(-3, head) for head, width in enumerate(bits)], -3)
        if bits == EXACT:
            return k.float()
        return self.base.read_keys(layer, k, KEY_ROWS[bits], 1 << bits)

    def _value(self, layer: int, v: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == EXACT:
            return v.float()
        return self.base.read_values(layer, v, VALUE_ROWS[bits], 1 << bits)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return self._key(layer, k, self.bits[0][layer])

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        (bits,) = flat([self.bits[1][layer]])
        return self._value(layer, v, bits)

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`."""
        group = min(self.base.group, head_dim)
        keys, values = (
            sum(mean_bits(bits, AFFINE, group, head_dim) for bits in side) / len(side) for side in self.bits
        )
        return keys, values


RECIPES: tuple[Callable[[], RowMethod], ...] = (partial(Plus, group=64), ServedFocus)
GOALS = ("k3v2", "k4v2", "k3v3", "k4v4", "2.75", "3.0", "3.25", "3.5", "4.0")
WIDE_RECIPES: tuple[Callable[[], RowMethod], ...] = (partial(Plus, group=128), partial(ServedFocus, group=128))
WIDE = ("k3v2", "2.5", "2.75", "3.0", "3.5", "4.0")
"""With groups of 128 channels: 2.25 bits are the least, and 2.5 compare with groups of 64 at two bits."""

CHART = [
    goal
    for goal in (f"k{keys}v{values}" for keys in WIDTHS for values in WIDTHS)
    if goal not in (*WIDE, f"k{BITS[0]}v{BITS[0]}", f"k{EXACT}v{EXACT}")
]
"""Every width of keys with every width of values, but what are rows already: of this list, the recipe and BF16."""

BROAD: tuple[Callable[[], RowMethod], ...] = (
    partial(Plus, group=64, label="calibrated on all kinds", domain="mixed"),
    partial(ServedFocus, label="calibrated on all kinds, 41K tokens", domain="broad"),
)
FEW = ("k3v2", "2.75", "3.0", "3.5", "4.0")

METHODS = [partial(Dial, make, goal) for make in RECIPES for goal in GOALS]
METHODS += [partial(Dial, make, goal) for make in WIDE_RECIPES for goal in WIDE]
METHODS += [partial(Dial, make, goal, by_model=True) for make in WIDE_RECIPES[1:] for goal in WIDE[1:4]]
METHODS += [partial(Dial, make, goal, table="chart") for make in WIDE_RECIPES for goal in CHART]
METHODS += [partial(Dial, make, goal, table="broad bits") for make in BROAD for goal in FEW]
METHODS += [partial(Dial, make, goal, by_model=True, table="broad bits") for make in BROAD for goal in FEW[1:]]
