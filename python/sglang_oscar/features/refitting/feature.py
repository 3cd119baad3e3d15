"""Fitting rotations again: what it adds to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, UPDATER, Touchpoint, at
from sglang_oscar.features.refitting import actions
from sglang_oscar.features.refitting.samples import Samples
from sglang_oscar.features.refitting.temporary import remove_abandoned
from sglang_oscar.memory.build import Built


def built(built: Built) -> None:
    """A sampler that sees nothing until it is asked to. What a server that was killed has sampled is removed."""
    built.cache.sampler = Samples()
    remove_abandoned()


FEATURE = Feature(
    name="refitting",
    in_schedulers=[Touchpoint(at(UPDATER + "check_weights"), AROUND, actions.around_check_weights)],
    built=built,
)
