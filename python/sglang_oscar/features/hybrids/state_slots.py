"""How much memory the states of linear layers get.

A state slot holds the state of one sequence at one position, however long the sequence is. A running request takes
several of them, and every position at which a cached prefix can be taken up again takes one. Beside each slot lies a
copy of the windows at that position (:mod:`sglang_oscar.features.hybrids.kept_windows`).

SGLang gives states a fixed part of the memory, which is in proportion to a 16-bit cache. Were that kept, states would
run out long before a smaller cache does. So a slot gets as many tokens beside it as it has in 16 bits, unless the
operator says --mamba-full-memory-ratio or --max-mamba-cache-size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.part import Part
from sglang_oscar.memory.plan import MemoryPlan

PER_REQUEST = 5
"""State slots that SGLang reckons with for a running request: what it reads and writes, two to keep states in while it
runs, and two of prefixes; with overlap scheduling."""
DRAFTING = 48
"""Requests that run at once on servers that draft, unless --max-running-requests says: SGLang's own default."""
RATIO = 0.9
"""SGLang's own memory of states over memory of the cache. Who asks for just that is not told from who asks for none."""


@dataclass(frozen=True)
class StateSlots(Part):
    """State slots of a server, the padding slot not counted.

    ``state_bytes`` is one slot over all linear layers of this rank, ``copy_bytes`` the copy of the windows beside it,
    0 where none is kept; ``per_request`` is how many slots SGLang reckons with for a running request, and ``verified``
    how many states it has besides, one behind every token that is verified at once.
    """

    slots: int
    state_bytes: int
    copy_bytes: int
    per_request: int
    verified: int = 0

    @property
    def copies(self) -> int:
        """Copies of windows: one for every slot and one for the padding slot, or none."""
        return self.slots + 1 if self.copy_bytes else 0

    @property
    def bytes(self) -> int:
        """Bytes of all slots and copies, those of the padding slot included."""
        return (self.slots + 1) * self.state_bytes + self.copies * self.copy_bytes

    @property
    def most_requests(self) -> int:
        """Requests that may run as far as states go."""
        return self.slots // self.per_request

    @property
    def verified_bytes(self) -> int:
        """Bytes of the states behind drafts, of :data:`DRAFTING` requests, or as many as slots allow, and one more."""
        return self.verified * self.state_bytes * (min(self.most_requests, DRAFTING) + 1)

    def lines(self, plan: MemoryPlan, tokens: int) -> list[str]:
        """For the start-up account."""
        states = (self.slots + 1) * self.state_bytes / GIB
        drafts = f" and {self.verified} states behind drafts" if self.verified else ""
        return [
            f"states of linear layers: {self.slots} slots x {self.state_bytes} bytes = {states:.3f} GiB, "
            f"{self.bytes / GIB:.3f} GiB with copies of windows of {self.copy_bytes} bytes; {self.per_request} slots"
            f"{drafts} a running request, so at most {self.most_requests} of them; "
            f"{tokens // max(self.slots, 1)} tokens of history a slot"
        ]


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


def slots_within(
    budget_bytes: int, ratio: float, slot_bytes: int, per_request: int = 1, verified_bytes: int = 0, running: int = 0
) -> int:
    """Slots beside the padding slot that fit into the part of a budget that states get; may be 0 or less.

    Args:
        budget_bytes: for states and cache.
        ratio: of states over cache.
        slot_bytes: of a slot and what lies beside it.
        per_request: slots of a running request.
        verified_bytes: of the states behind the tokens of a request that are verified at once; there is one request's
            more than may run.
        running: requests that may run, if slots allow it.

    >>> slots_within(1000, 1.0, 20), slots_within(1000, 1.0, 20, 5, 100, 1), slots_within(1000, 1.0, 20, 5, 100, 9)
    (24, 14, 9)
    """
    share = int(budget_bytes * ratio / (1 + ratio)) - verified_bytes
    all_run = (share - running * verified_bytes) // slot_bytes
    as_slots_allow = int(share // (slot_bytes + verified_bytes / per_request))
    return max(all_run, as_slots_allow) - 1


def copy_bytes(geometry: Geometry, prefix_cache: bool) -> int:
    """Bytes of the copy of the windows beside a state slot; 0 where nothing is taken up again."""
    return geometry.ring_bytes + geometry.sink_bytes if prefix_cache else 0


NAMES = {
    "heads": ("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"),
    "head_dim": ("linear_value_head_dim", "mamba_head_dim", "mamba_d_head"),
    "groups": ("linear_num_key_heads", "n_groups", "mamba_n_groups"),
    "width": ("linear_key_head_dim", "ssm_state_size", "mamba_d_state"),
    "kernel": ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"),
    "layers": ("linear_layer_ids", "mamba_layer_ids"),
}
"""What configurations call the sizes of a state: a head's is [head_dim, width], and heads of a group share what lies in
front of them, two vectors of that width."""


def state_bytes(linear: Any, ranks: int = 1) -> int:
    """Bytes of a state of all linear layers of a rank; SGLang's own figure needs its ranks set up.

    Args:
        linear: SGLang's configuration of the linear layers.
        ranks: that share the heads.
    """
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    of = {size: next(getattr(linear, name) for name in names if hasattr(linear, name)) for size, names in NAMES.items()}
    heads, groups = of["heads"] // ranks, max(of["groups"] // ranks, 1)
    past = (2 * groups * of["width"] + heads * of["head_dim"]) * (of["kernel"] - 1) * torch.bfloat16.itemsize
    each = past + heads * of["head_dim"] * of["width"] * mamba2_state_dtype(linear).temporal.itemsize
    return int(each * len(of["layers"]))


def estimate(linear: Any, geometry: Geometry, budget_bytes: int, ranks: int = 1, verified: int = 0) -> StateSlots:
    """The state slots of a rank of a server with the defaults of SGLang.

    Args:
        linear: SGLang's configuration of the linear layers.
        geometry: of the rank.
        budget_bytes: for states and cache.
        ranks: that share the heads.
        verified: tokens of a request that are verified at once.
    """
    state = state_bytes(linear, ranks)
    copy = copy_bytes(geometry, prefix_cache=True)
    running = DRAFTING if verified else 0
    slots = slots_within(budget_bytes, balanced_ratio(geometry), state + copy, PER_REQUEST, verified * state, running)
    return StateSlots(max(slots, 0), state, copy, PER_REQUEST, verified)
