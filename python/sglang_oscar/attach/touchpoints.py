"""Every place where the plugin hooks SGLang, by the processes of a server. Rooms list theirs in their ``feature.py``.

A hook costs the start of a process: SGLang's module is imported, and every module is searched for other names of the
function. So the process that launches a server gets only what it runs itself, and a server that does not ask for int2
nothing else (:mod:`sglang_oscar.attach.processes`).
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_oscar.attach import gate, releases
from sglang_oscar.attach.feature import features
from sglang_oscar.attach.touchpoint import ARGS, AROUND, BEFORE, Touchpoint, at

RESOLUTION = at(ARGS + "ServerArgs.resolve_once", ARGS + "ServerArgs.__post_init__")

GATE: list[Touchpoint] = [
    Touchpoint(at(ARGS + "prepare_server_args"), AROUND, gate.around_prepare_server_args),
    Touchpoint(RESOLUTION, AROUND, gate.around_resolution),
    Touchpoint(at(ARGS + "ServerArgs.check_server_args"), BEFORE, gate.before_check_server_args),
]
"""Arguments: defaults and refusals. In every process."""

TAKEN_NAME: list[Touchpoint] = [Touchpoint(RESOLUTION, BEFORE, gate.before_resolution_of_taken_name)]
"""All that is hooked where SGLang itself has a cache dtype of our name."""


def of_arguments() -> list[Touchpoint]:
    """The hooks of every process."""
    return [*GATE, *(point for feature in features() for point in feature.in_arguments)]


def of_scheduler(int2: bool) -> list[Touchpoint]:
    """What a scheduler has beside them.

    Args:
        int2: whether its server may serve in int2 mode.
    """
    points: list[Touchpoint] = []
    for feature in features():
        points += feature.in_schedulers if int2 else ()
        points += feature.in_every_scheduler
        if feature.any_server is not None and feature.any_server.wanted():
            points += feature.any_server.in_schedulers
    return points


def absent(touchpoints: list[Touchpoint]) -> list[str]:
    """Functions that the installed release lacks, of those that are to be hooked."""
    return [point.name for point in touchpoints if releases.first_existing(point.targets) is None]


def register_all(touchpoints: list[Touchpoint]) -> list[str]:
    """Queue hooks with SGLang's registry, which attaches them once every plugin is loaded.

    Returns:
        the functions that are to be hooked.
    """
    for point in touchpoints:
        HookRegistry.register(point.target(), point.hook, point.kind)
    return [point.target() for point in touchpoints]
