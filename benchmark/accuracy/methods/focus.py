"""The recipe ``focus`` as it is served, and the laboratory's wider form of it: centers that turn with the position,
values weighed by attention, and everything chosen per kv head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.focus_fit import FocusFit
from accuracy.focus_side import FocusLayer, FocusOptions, Request
from accuracy.methods.base import Method, RowMethod, Transforms
from accuracy.quantizers import uniform_bits
from oscar_rotation.dump import DumpChunk
from oscar_rotation.fit.held_out import HELD_OUT_TOKENS, requests
from oscar_rotation.fit.samples import plan_samples
from oscar_rotation.math.attention_weights import sensitivity
from oscar_rotation.recipes import focus as recipe
from oscar_rotation.recipes.plus import CLIP_RATIO, KEY_GAIN, VALUE_GAIN


def requests_of(calibration: Calibration, layer: int) -> list[Request]:
    """Calibration sequences of one layer as the fit wants them."""
    x, heads = calibration.layers[layer], calibration.kv_heads
    out, begin = [], 0
    for length in calibration.seq_lens:
        span = slice(begin, begin + length)
        q = x.q[span].unflatten(1, (heads, -1)).transpose(0, 1).contiguous()
        k, v = (y[span].transpose(0, 1).contiguous() for y in (x.k, x.v))
        out.append(Request(q, k, v, calibration.rotary(length)))
        begin += length
    return out


@dataclass
class Focus(Method):
    """See :mod:`accuracy.focus_fit`, which knows no sink logits.

    Attributes:
        label: what differs from the recipe; "" for the recipe itself.
        options: of the fit.
        domain: calibration text.
        sink, recent: of the windows.
        table: of the report.
    """

    label: str = ""
    options: FocusOptions = field(default_factory=FocusOptions)
    domain: str = "retrieval"
    sink: int = 64
    recent: int = 256
    table: str = "methods"
    source: str = "this project; see benchmark/accuracy/focus_fit.py"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"focus g{self.options.group}" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Both sides of every layer."""
        self.rotary = calibration.rotary
        self.layers = [self._layer(calibration, n) for n in range(len(calibration.layers))]

    def _layer(self, calibration: Calibration, layer: int) -> FocusLayer:
        requests = calibration.once((layer, "focus requests"), lambda: requests_of(calibration, layer))
        scale = calibration.head_dim**-0.5
        known = calibration.once((layer, "focus sensitivity"), lambda: [sensitivity(r.q, r.k, scale) for r in requests])
        fit = FocusFit(requests, scale, calibration.readers[layer], self.options, known)
        o = self.options
        keys = (layer, "focus keys", replace(o, value_levels=4, value_shares=(), value_clips=(), value_centers=False))
        values = (layer, "focus values", o.group, o.value_levels, o.value_shares, o.per_head, o.value_centers,
                  o.value_clips, o.held_out)  # fmt: skip
        return FocusLayer(calibration.once(keys, fit.keys), calibration.once(values, fit.values))

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        tables = self.rotary(k.shape[2])
        return self.layers[layer].key.read(k.float(), tables, self.options.group, self.options.key_levels)

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        tables = self.rotary(v.shape[2])
        return self.layers[layer].value.read(v.float(), tables, self.options.group, self.options.value_levels)

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`; three levels are packed five to a byte."""
        group = min(self.options.group, head_dim)
        bits = [8 / 5 if n == 3 else math.log2(n) for n in (self.options.key_levels, self.options.value_levels)]
        return uniform_bits(bits[0], group), uniform_bits(bits[1], group)


@dataclass
class ServedFocus(RowMethod):
    """What ``oscar fit --recipe focus`` writes (:mod:`oscar_rotation.recipes.focus`), from the same functions.

    Attributes:
        label: what differs from the usual calibration; "" for nothing.
        group, domain, sink, recent, table: as of :class:`Focus`.
        context: positions that keys may have; None for the model's, 0 for those of the calibration text alone.
        k_clip, v_clip, k_gain, v_gain: those of the files.
    """

    label: str = ""
    group: int = 64
    domain: str = "retrieval"
    context: int | None = None
    k_clip: float = CLIP_RATIO
    v_clip: float = CLIP_RATIO
    k_gain: float = KEY_GAIN
    v_gain: float = VALUE_GAIN
    sink: int = 64
    recent: int = 256
    table: str = "methods"
    source: str = "this project; see rotation/oscar_rotation/recipes/focus.py"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"focus g{self.group}, served form" + (f", {self.label}" if self.label else "")

    def fit(self, calibration: Calibration) -> None:
        """Both sides of every layer."""
        numbers = range(len(calibration.layers))
        layers = [
            calibration.once((n, "focus served", self.context), partial(served_layer, calibration, n, self.context))
            for n in numbers
        ]
        heads = [[(key.transform, key.dual.mT) for key in layer.keys] for layer in layers]
        forward, back = (torch.stack([torch.stack([pair[i] for pair in layer]) for layer in heads]) for i in (0, 1))
        centers = torch.stack([layer.center for layer in layers])
        self.key = Transforms(*(x.float().to(calibration.device) for x in (forward, back, centers)))
        values = (torch.stack([layer.value.transform for layer in layers]),
                  torch.stack([layer.value.dual.mT for layer in layers]))  # fmt: skip
        self.value = Transforms(*(x.float().to(calibration.device) for x in values))


def served_layer(calibration: Calibration, layer: int, context: int | None) -> recipe.FocusLayer:
    """The recipe's fit of one layer, held-out requests chosen as the command chooses them."""
    x = calibration.layers[layer]
    chunk = DumpChunk(x.q, x.k, x.v, tuple(calibration.seq_lens))
    first = plan_samples({0: chunk.seq_lens}, HELD_OUT_TOKENS)[0]
    fitted, later = chunk.split(first)
    d = calibration.head_dim
    sinks = calibration.sink_logits(layer)
    moments = recipe.FocusMoments(calibration.kv_heads, d, d, d**-0.5, calibration.device, sinks)
    moments.update_keys(fitted)
    moments.update_values(chunk)
    positions = calibration.positions(context)
    return recipe.fit_focus_layer(moments, list(requests(later, sinks)), calibration.readers[layer], positions)


def variant(label: str, table: str = "focus", domain: str = "retrieval", **changes: object) -> Callable[[], Focus]:
    """The recipe with other options."""
    return partial(Focus, label=label, options=replace(FocusOptions(), **changes), table=table, domain=domain)  # type: ignore[arg-type]


FIXED = {"clips": FocusOptions.clips[:1], "gains": FocusOptions.gains[:1], "value_clips": FocusOptions.value_clips[:1]}
"""Clip ratios and gains as in ``plus``."""

PLUS_VALUES = {"value_shares": (0.0,), "value_centers": False}
"""Values as in ``plus``, but for a transform per kv head."""

METHODS = [
    ServedFocus,
    partial(ServedFocus, group=128),
    partial(ServedFocus, label="positions of the calibration text alone", table="focus", context=0),
    partial(ServedFocus, label="calibrated on all kinds", table="domains", domain="mixed"),
    partial(ServedFocus, label="calibrated on all kinds, 41K tokens", table="domains", domain="broad"),
    partial(ServedFocus, label="calibrated on descriptions", table="domains", domain="descriptions"),
    Focus,
    partial(Focus, options=FocusOptions(group=128)),
    variant("unweighted, constant center", shares=(0.0,), turning=(False,), **FIXED, **PLUS_VALUES),
    variant("unweighted, turning center", shares=(0.0,), turning=(True,), **FIXED, **PLUS_VALUES),
    variant("half weighted, constant center", shares=(0.5,), turning=(False,), **FIXED, **PLUS_VALUES),
    variant(".9 weighted, turning center", shares=(0.9,), turning=(True,), **FIXED, **PLUS_VALUES),
    variant("chosen by head, clip and gain fixed", **FIXED, **PLUS_VALUES),
    variant("values as in plus", **PLUS_VALUES),
    variant("a second round", rounds=1),
    variant("queries weighted too", query_shares=(0.5, 0.9)),
    variant("constant centers", turning=(False,)),
    variant("one transform a layer", per_head=False),
    variant("clip and gain as in plus", **FIXED),
    variant("calibrated on source", table="domains", domain="source"),
    variant("calibrated on docs", table="domains", domain="docs"),
    variant("calibrated on chat", table="domains", domain="chat"),
    variant("calibrated on descriptions", table="domains", domain="descriptions"),
    variant("calibrated on all kinds", table="domains", domain="mixed"),
    variant("calibrated on all kinds, 41K tokens", table="domains", domain="broad"),
    variant("values as in plus, calibrated on all kinds", table="domains", domain="mixed", **PLUS_VALUES),
    variant("values as in plus, calibrated on all kinds, 41K tokens", table="domains", domain="broad", **PLUS_VALUES),
    variant(
        "constant centers, values as in plus, calibrated on all kinds, 41K tokens",
        table="domains",
        domain="broad",
        turning=(False,),
        **PLUS_VALUES,
    ),
    *(
        variant(f"K{k}V{v}", table="bits", key_levels=2**k, value_levels=2**v)
        for k, v in ((2, 4), (3, 2), (3, 3), (4, 2), (4, 4))
    ),
    variant("K3 with ternary values", table="bits", key_levels=8, value_levels=3),
]
