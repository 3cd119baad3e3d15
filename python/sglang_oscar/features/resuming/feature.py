"""Kept windows: what they take of the budget, what they do not go with, and who asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_oscar.attach.arguments import algorithm, disaggregated
from sglang_oscar.attach.feature import Feature
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.resuming.resumed import Resumed
from sglang_oscar.formats.cached_layers import linear_config
from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.build import Built
from sglang_oscar.memory.part import Part, Sizing
from sglang_oscar.memory.saver import kv_region
from sglang_oscar.settings import Settings, variable
from sglang_oscar.worker import of_this_process

VARIABLE = variable("kept_windows")

_resumed: Resumed | None = None
"""Of the pool of this process that requests of a server are in."""


@dataclass(frozen=True)
class KeptRings(Part):
    """Room for ``windows`` copies of a ring of ``ring_bytes``."""

    windows: int
    ring_bytes: int
    name = "kept windows"
    flag = VARIABLE

    def fixed_bytes(self, requests: int) -> int:
        """Of all copies, however many requests run."""
        return self.windows * self.ring_bytes

    def lines(self, plan: Any, tokens: int) -> list[str]:
        """For the start-up account."""
        return [f"kept windows: {self.windows} x {self.ring_bytes} bytes = {self.fixed_bytes(0) / GIB:.3f} GiB"]


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse servers whose windows come back otherwise, or whose rings hold what is not accepted yet.

    Raises:
        Int2Error: naming the variable.
    """
    if not settings.kept_windows:
        return
    reasons = (
        (not settings.recompute_recent, f"{variable('recompute_recent')}=0, which reads no exact window"),
        (settings.windows.recent == 0, "no recent window"),
        (algorithm(args) is not None, "speculative decoding"),
        (disaggregated(args), "--disaggregation-mode"),
        (model.is_hybrid_swa, "models with sliding windows"),
        (linear_config(model) is not None, "models with linear attention, which keep theirs"),
    )
    if (reason := next((text for holds, text in reasons if holds), None)) is not None:
        raise Int2Error(f"{VARIABLE} does not go with {reason}; unset it")


def parts(sizing: Sizing) -> list[KeptRings]:
    """Room for as many windows as were asked for."""
    windows = of_this_process().kept_windows
    return [KeptRings(windows, sizing.geometry.ring_bytes)] if windows else []


def built(of: Built) -> None:
    """Begin to keep windows of a cache."""
    global _resumed
    if windows := of.cache.settings.kept_windows:
        rings = of.cache.window_buffers.rings
        with kv_region(of.pool):
            copies = [ring.new_zeros(ring.shape[0], windows, *ring.shape[2:]) for ring in rings]
        _resumed = of.cache.resumed = Resumed(of.cache, copies)
        of.cache.seats.moves = _resumed.move


def covered(req: Any, input_len: int) -> int:
    """See :meth:`Resumed.covered`."""
    return 0 if _resumed is None else _resumed.covered(req, input_len)


FEATURE = Feature(name="resuming", check=check, parts=parts, built=built, covered=covered)
