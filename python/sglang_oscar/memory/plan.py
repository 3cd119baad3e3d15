"""Where the KV budget goes: INT2 rows, BF16 window buffers for as many requests as may run, and what rooms add to it.

Stock SGLang would admit 2,048 and more requests; each takes a BF16 window here (36 MiB on Qwen3-8B), so the number
of running requests is derived from the budget before the history pool is sized from what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from oscar_kernels.format import mean_bits
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.part import Part

DEFAULT_MAX_RUNNING = 256
WINDOW_SHARE = 0.2
"""Largest share of the budget that window buffers take when --max-running-requests is not given."""

Kind = TypeVar("Kind", bound=Part)


@dataclass(frozen=True)
class MemoryPlan:
    """How many requests may run, and what takes how much of the budget for them.

    ``parts`` are what the rooms of the plugin need beside rows and windows. Of a hybrid model the budget is what states
    leave.
    """

    geometry: Geometry
    max_running: int
    budget_bytes: int
    parts: tuple[Part, ...] = ()

    def part(self, kind: type[Kind]) -> Kind | None:
        """The part of a kind; None where the server has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def waiting(self) -> int:
        """Requests that hold a window beside the running ones: on a decode server those whose prompts are on their
        way."""
        return sum(part.waiting for part in self.parts)

    @property
    def requests(self) -> int:
        """Requests that hold a window."""
        return self.max_running + self.waiting

    @property
    def owners(self) -> str:
        """The same in words."""
        return f"{self.max_running} running requests" + (f" and {self.waiting} waiting ones" if self.waiting else "")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all pools whose size follows the history pool's."""
        return self.geometry.cell_bytes + sum(part.bytes_per_token for part in self.parts)

    @property
    def rings(self) -> int:
        """Recent rings, one of each seat, the dummy 0 included."""
        return self.requests + 1

    @property
    def sink_blocks(self) -> int:
        """Sink blocks: one per request with a window, as many again for idle prefixes, and the dummy block 0."""
        return 2 * self.requests + 1

    @property
    def copies(self) -> int:
        """Rings and sink blocks beside those of requests."""
        return sum(part.copies for part in self.parts)

    @property
    def window_bytes(self) -> int:
        """Bytes of ring and sink store, copies not counted."""
        return self.rings * self.geometry.ring_bytes + self.sink_blocks * self.geometry.sink_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all that is not the history pool."""
        return self.window_bytes + sum(part.fixed_bytes(self.requests) for part in self.parts)

    def lines(self, tokens: int) -> list[str]:
        """The start-up account.

        Args:
            tokens: capacity of the history pool.
        """
        geometry = self.geometry
        bits = ", ".join(f"{geometry.bits_per_element(n * 1024):.2f} at {n}K" for n in (8, 32, 128))
        full = tokens * geometry.full_token_bytes
        sizes = ", ".join(map(str, geometry.group_sizes))
        groups = f"group {sizes}; " if sizes else ""
        return [
            f"history pool: {tokens} tokens x {geometry.cell_bytes} bytes = {tokens * geometry.cell_bytes / GIB:.3f} "
            f"GiB ({mean_bits(geometry.formats.values()):.2f} bits per element, {groups}"
            f"16 bits would take {full / GIB:.3f} GiB)",
            f"window buffers: {self.window_bytes / GIB:.3f} GiB of a {self.budget_bytes / GIB:.3f} GiB budget: "
            f"{self.rings} recent rings of {geometry.windows.ring} tokens, {self.sink_blocks} sink blocks of "
            f"{geometry.windows.sink} tokens, for at most {self.max_running} running requests"
            + (f" and {self.waiting} whose prompts are on their way" if self.waiting else ""),
            f"effective bits per element with windows: {bits}",
            *(line for part in self.parts for line in part.lines(self, tokens)),
        ]


def make_plan(
    geometry: Geometry, budget_bytes: int, max_running: int | None, page_size: int, parts: Sequence[Part] = ()
) -> MemoryPlan:
    """Split a budget.

    Args:
        geometry: costs on this rank.
        budget_bytes: bytes that the KV cache and everything beside it may take.
        max_running: --max-running-requests, or None to derive it.
        page_size: tokens per page.
        parts: what else takes of the budget.

    Raises:
        Int2Error: the window buffers leave no room for history.
    """
    per_request = geometry.ring_bytes + 2 * geometry.sink_bytes
    fixed = geometry.ring_bytes + geometry.sink_bytes + sum(part.waiting for part in parts) * per_request
    for part in parts:
        least, most = (part.fixed_bytes(requests) for requests in (1, DEFAULT_MAX_RUNNING))
        more = max(most - least, 0) // (DEFAULT_MAX_RUNNING - 1)
        fixed += least - more
        per_request += more
    if max_running is None:
        room = WINDOW_SHARE * budget_bytes - fixed
        limit = int(room // per_request) if per_request else DEFAULT_MAX_RUNNING
        max_running = max(1, min(limit, DEFAULT_MAX_RUNNING))
    for bound in (part.most_requests for part in parts):
        max_running = max_running if bound is None else max(1, min(max_running, bound))
    plan = MemoryPlan(geometry, max_running, budget_bytes, tuple(parts))
    # The pool needs the padding page and at least one page for a request.
    needed = plan.fixed_bytes + 2 * page_size * plan.token_bytes
    if needed > budget_bytes:
        raise Int2Error(_too_small(plan))
    return plan


def _too_small(plan: MemoryPlan) -> str:
    """What takes the budget, and what would make it less."""
    said = [f"BF16 windows of {plan.owners} take {plan.window_bytes / GIB:.3f} GiB"]
    remedies = ["--max-running-requests", "SGLANG_MIXED_KV_RECENT_TOKENS", "SGLANG_MIXED_KV_PREFIX_TOKENS"]
    for part in plan.parts:
        if size := part.fixed_bytes(plan.requests):
            said.append(f"{part.name} {size / GIB:.3f} GiB")
        if part.flag is not None and (size or part.waiting):
            remedies.append(part.flag)
    return (
        f"the KV budget of {plan.budget_bytes / GIB:.3f} GiB is too small for int2 mode: {', '.join(said)}; lower "
        f"{', '.join(remedies[:-1])} or {remedies[-1]}, or raise --mem-fraction-static"
    )
