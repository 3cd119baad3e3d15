"""How much memory the states of linear layers get.

A state slot holds the state of one sequence at one position, however long the sequence is. A running request takes
several of them, and every position at which a cached prefix can be taken up again takes one. Beside each slot lies a
copy of the windows at that position (:mod:`sglang_oscar.hybrids.kept_windows`).

SGLang gives states a fixed part of the memory, which is in proportion to a 16-bit cache. Were that kept, states would
run out long before a smaller cache does. So a slot gets as many tokens beside it as it has in 16 bits, unless the
operator says --mamba-full-memory-ratio or --max-mamba-cache-size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.memory.plan import GIB, Geometry
from sglang_oscar.names import is_int2

PER_REQUEST = 5
"""State slots that SGLang reckons with for a running request: what it reads and writes, two to keep states in while it
runs, and two of prefixes; with overlap scheduling."""
RATIO = 0.9
"""SGLang's own memory of states over memory of the cache. Who asks for just that is not told from who asks for none."""


@dataclass(frozen=True)
class StateSlots:
    """State slots of a server, the padding slot not counted.

    ``state_bytes`` is one slot over all linear layers of this rank, ``copy_bytes`` the copy of the windows beside it,
    0 where none is kept; ``per_request`` is how many slots SGLang reckons with for a running request.
    """

    slots: int
    state_bytes: int
    copy_bytes: int
    per_request: int

    @property
    def copies(self) -> int:
        """Copies of windows: one for every slot and one for the padding slot, or none."""
        return self.slots + 1 if self.copy_bytes else 0

    @property
    def bytes(self) -> int:
        """Bytes of all slots and copies, those of the padding slot included."""
        return (self.slots + 1) * self.state_bytes + self.copies * self.copy_bytes

    @property
    def requests(self) -> int:
        """Requests that may run as far as states go."""
        return self.slots // self.per_request

    def line(self, tokens: int) -> str:
        """The line of the start-up account.

        Args:
            tokens: capacity of the history pool.
        """
        states = (self.slots + 1) * self.state_bytes / GIB
        return (
            f"states of linear layers: {self.slots} slots x {self.state_bytes} bytes = {states:.3f} GiB, "
            f"{self.bytes / GIB:.3f} GiB with copies of windows of {self.copy_bytes} bytes; {self.per_request} slots a "
            f"running request, so at most {self.requests} of them; {tokens // max(self.slots, 1)} tokens of history a "
            "slot"
        )


def balanced_ratio(geometry: Geometry, given: float | None = None) -> float:
    """Memory of states over memory of the cache: what was given, or as much more than SGLang's own as the cache is
    smaller.

    >>> from oscar_kernels.layout import RowLayout; from oscar_kernels.cache import Windows; import torch
    >>> rows = RowLayout(2, 256, 128, torch.bfloat16)
    >>> geometry = Geometry.uniform(rows, Windows(64, 256, 256), torch.bfloat16, 12)
    >>> round(balanced_ratio(geometry), 2), balanced_ratio(geometry, 0.5)
    (6.4, 0.5)
    """
    return RATIO * geometry.full_token_bytes / geometry.cell_bytes if given in (None, RATIO) else given


def slots_within(budget_bytes: int, ratio: float, slot_bytes: int) -> int:
    """Slots beside the padding slot that fit into the part of a budget that states get; may be 0 or less."""
    return int(budget_bytes * ratio / (1 + ratio)) // slot_bytes - 1


def copy_bytes(geometry: Geometry, prefix_cache: bool) -> int:
    """Bytes of the copy of the windows beside a state slot; 0 where nothing is taken up again."""
    return geometry.ring_bytes + geometry.sink_bytes if prefix_cache else 0


def state_slots(configurator: Any, geometry: Geometry) -> StateSlots | None:
    """The state slots that SGLang has decided on; None for a model without linear layers.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        geometry: of this rank.
    """
    from sglang.srt.runtime_context import get_memory, get_schedule

    linear = configurator.mambaish_config
    if linear is None:
        return None
    return StateSlots(
        slots=get_schedule().max_mamba_cache_size,
        state_bytes=linear.mamba2_cache_params.mamba_cache_per_req,
        copy_bytes=copy_bytes(geometry, not get_memory().disable_radix_cache),
        per_request=configurator._calculate_mamba_ratio(),
    )


def estimate(linear: Any, geometry: Geometry, budget_bytes: int) -> StateSlots:
    """The state slots of a server of one rank with the defaults of SGLang.

    Args:
        linear: SGLang's configuration of the linear layers.
        geometry: of the model.
        budget_bytes: for states and cache.
    """
    # SGLang's own figure needs its ranks set up.
    keys, values = linear.linear_num_key_heads, linear.linear_num_value_heads
    k_dim, v_dim = linear.linear_key_head_dim, linear.linear_value_head_dim
    past = (2 * keys * k_dim + values * v_dim) * (linear.linear_conv_kernel_dim - 1) * torch.bfloat16.itemsize
    state = len(linear.linear_layer_ids) * (past + values * v_dim * k_dim * torch.float32.itemsize)
    copy = copy_bytes(geometry, prefix_cache=True)
    slots = slots_within(budget_bytes, balanced_ratio(geometry), state + copy)
    return StateSlots(max(slots, 0), state, copy, PER_REQUEST)


def around_handle_max_mamba_cache(original: Callable[..., float], self: Any, total_rest_memory: float) -> float:
    """Decide the number of slots, and take their copies of windows off the memory that is left; GiB in, GiB out."""
    if not is_int2(self.server_args):
        return original(self, total_rest_memory)
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule

    from sglang_oscar.memory.sizing import geometry_of

    try:
        geometry, schedule = geometry_of(self), get_schedule()
        beside = copy_bytes(geometry, not get_memory().disable_radix_cache)
        if schedule.max_mamba_cache_size is None and not get_memory().disable_radix_cache:
            ratio = balanced_ratio(geometry, schedule.mamba_full_memory_ratio)
            slot = self.mambaish_config.mamba2_cache_params.mamba_cache_per_req + beside
            slots, needed = slots_within(int(total_rest_memory * GIB), ratio, slot), self._calculate_mamba_ratio()
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
