"""Hook into SGLang's sizing of the states of linear layers: their number, and memory for what lies beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.features.hybrids.state_slots import StateSlots, balanced_ratio, copy_bytes, slots_within
from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.configurator import geometry_of
from sglang_oscar.memory.part import Sizing
from sglang_oscar.names import is_int2


def parts(sizing: Sizing) -> list[StateSlots]:
    """The state slots that SGLang has decided on; none for a model without linear layers."""
    from sglang.srt.runtime_context import get_memory, get_schedule

    linear = sizing.configurator.mambaish_config
    if linear is None:
        return []
    slots = StateSlots(
        slots=get_schedule().max_mamba_cache_size,
        state_bytes=linear.mamba2_cache_params.mamba_cache_per_req,
        copy_bytes=copy_bytes(sizing.geometry, not get_memory().disable_radix_cache),
        per_request=sizing.configurator._calculate_mamba_ratio(),
        verified=new_tokens(releases.resolved(sizing.configurator.server_args)),
    )
    return [slots]


def around_handle_max_mamba_cache(original: Callable[..., float], self: Any, total_rest_memory: float) -> float:
    """Decide the number of slots, and take their copies of windows off the memory that is left; GiB in, GiB out."""
    if not is_int2(self.server_args):
        return original(self, total_rest_memory)
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule

    try:
        geometry, schedule = geometry_of(self), get_schedule()
        beside = copy_bytes(geometry, not get_memory().disable_radix_cache)
        if schedule.max_mamba_cache_size is None and not get_memory().disable_radix_cache:
            ratio = balanced_ratio(geometry, schedule.mamba_full_memory_ratio)
            state, needed = self.mambaish_config.mamba2_cache_params.mamba_cache_per_req, self._calculate_mamba_ratio()
            slot, verified = state + beside, state * new_tokens(releases.resolved(self.server_args))
            slots = slots_within(
                int(total_rest_memory * GIB), ratio, slot, needed, verified, schedule.max_running_requests or 0
            )
            if slots < needed:
                raise Int2Error(
                    f"states of linear layers take {slot / GIB:.3f} GiB a slot, a request {needed} slots; there are "
                    f"{total_rest_memory:.3f} GiB for states and cache; raise --mem-fraction-static or "
                    "--mamba-full-memory-ratio"
                )
            get_context().override("int2.state_slots", max_mamba_cache_size=slots)
    except Int2Error as error:
        fatal(error)
    left = original(self, total_rest_memory)
    return left - (get_schedule().max_mamba_cache_size + 1) * beside / GIB
