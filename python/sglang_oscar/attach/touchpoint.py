"""A function of SGLang that is hooked, and the beginnings of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from sglang_oscar.attach import releases

SRT = "sglang.srt."
ARGS = SRT + "server_args."
MEM = SRT + "mem_cache."
CONFIGURATOR = MEM + "kv_cache_configurator.KVCacheConfigurator."
SCHEDULER = SRT + "managers.scheduler.Scheduler."
UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
REQUEST = SRT + "managers.schedule_batch.Req."
BEFORE, AFTER, AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND


class Touchpoint(NamedTuple):
    """A function of SGLang and what happens around it.

    ``targets`` are the dotted names that it has in the supported releases: the first that the installed one has is
    hooked. Where it has none, that is reported like a hook that does not attach.
    """

    targets: tuple[str, ...]
    kind: HookType
    hook: Callable[..., Any]

    @property
    def name(self) -> str:
        """The first target, by which the row is told from others."""
        return self.targets[0]

    def target(self) -> str:
        """The function to hook in the installed release."""
        return releases.first_existing(self.targets) or self.name


def at(*targets: str) -> tuple[str, ...]:
    """Names of a function in the supported releases, those to be preferred first."""
    return targets
