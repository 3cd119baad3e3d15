"""Where the KV budget goes: INT2 rows, BF16 side buffers for as many requests as may run, a workspace for extend.

Stock SGLang would admit 2,048 and more requests; each takes a BF16 window here (36 MiB on Qwen3-8B), so the number
of running requests is derived from the budget before the history pool is sized from what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_kernels.format import mean_bits
from sglang_oscar.attention.workspace import Workspace
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.hybrids.state_slots import StateSlots
from sglang_oscar.features.sliding_windows.plan import WindowPool
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.scratch import Scratch

DEFAULT_MAX_RUNNING = 256
SIDE_SHARE = 0.2
"""Largest share of the budget that side buffers take when --max-running-requests is not given."""


@dataclass(frozen=True)
class MemoryPlan:
    """How many requests may run, what their side buffers take, and what extend takes (None: nothing).

    ``draft_bytes`` are those of a token in the cache of a draft model, 0 where there is none. ``waiting`` counts
    further requests that hold a window: on a decode server those whose prompts are on their way. ``states`` are those
    of a hybrid model's linear layers; the budget is what they leave. ``windows`` is what layers with a sliding window
    need, None where there are none. ``scratch`` is what decode and verification take beside the cache (None: nothing).
    """

    geometry: Geometry
    max_running: int
    budget_bytes: int
    extend: Workspace | None = None
    draft_bytes: int = 0
    waiting: int = 0
    states: StateSlots | None = None
    windows: WindowPool | None = None
    scratch: Scratch | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all pools whose size follows the history pool's."""
        own = self.geometry.cell_bytes + self.draft_bytes
        return own if self.windows is None else own + self.windows.bytes_per_token

    @property
    def ring_rows(self) -> int:
        """Ring rows, the dummy row 0 included."""
        return self.max_running + self.waiting + 1

    @property
    def sink_blocks(self) -> int:
        """Sink blocks: one per request with a window, as many again for idle prefixes, and the dummy block 0."""
        return 2 * (self.max_running + self.waiting) + 1

    @property
    def side_bytes(self) -> int:
        """Bytes of ring and sink store."""
        return self.ring_rows * self.geometry.ring_bytes + self.sink_blocks * self.geometry.sink_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all that is not the history pool."""
        windows = 0 if self.windows is None else self.windows.fixed_bytes(self.max_running)
        return self.side_bytes + windows + self.workspace_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of what attention takes beside the cache."""
        steps = 0 if self.scratch is None else self.scratch.total_bytes(self.max_running + self.waiting)
        return steps + (0 if self.extend is None else self.extend.total_bytes)

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
            f"side buffers: {self.side_bytes / GIB:.3f} GiB of a {self.budget_bytes / GIB:.3f} GiB budget: "
            f"{self.ring_rows} recent rings of {geometry.windows.ring} tokens, {self.sink_blocks} sink blocks of "
            f"{geometry.windows.sink} tokens, for at most {self.max_running} running requests"
            + (f" and {self.waiting} whose prompts are on their way" if self.waiting else ""),
            f"effective bits per element with windows: {bits}",
            *([] if self.states is None else [self.states.line(tokens)]),
            *([] if self.draft_bytes == 0 else [self._draft_line(tokens)]),
            *([] if self.windows is None else self._window_lines(self.windows, tokens)),
            *([] if self.extend is None else [self.extend.line()]),
            *([] if self.scratch is None else [self.scratch.line(self.max_running + self.waiting)]),
        ]

    def _window_lines(self, windows: WindowPool, tokens: int) -> list[str]:
        geometry = self.geometry
        return windows.lines(self.max_running, tokens, geometry.cell_bytes, geometry.full_token_bytes)

    def _draft_line(self, tokens: int) -> str:
        share = self.draft_bytes / self.token_bytes
        return (
            f"draft model's cache: {tokens} tokens x {self.draft_bytes} bytes = "
            f"{tokens * self.draft_bytes / GIB:.3f} GiB, not quantized; without it the same memory would hold "
            f"{share / (1 - share):.0%} more tokens"
        )


def make_plan(
    geometry: Geometry,
    budget_bytes: int,
    max_running: int | None,
    page_size: int,
    extend: Workspace | None = None,
    draft_bytes: int = 0,
    waiting: int = 0,
    states: StateSlots | None = None,
    windows: WindowPool | None = None,
    scratch: Scratch | None = None,
) -> MemoryPlan:
    """Split a budget.

    Args:
        geometry: costs on this rank.
        budget_bytes: bytes that the KV cache and its side buffers may take.
        max_running: --max-running-requests, or None to derive it.
        page_size: tokens per page.
        extend: what extend takes of the budget.
        draft_bytes: of a token in the cache of a draft model.
        waiting: requests with a window beyond the running ones.
        states: of linear layers, which bound the requests that may run.
        windows: what layers with a sliding window need.
        scratch: what decode and verification take beside the cache.

    Raises:
        Int2Error: the side buffers leave no room for history.
    """
    per_request = geometry.ring_bytes + 2 * geometry.sink_bytes
    fixed = geometry.ring_bytes + geometry.sink_bytes + waiting * per_request
    if windows is not None:
        fixed += windows.fixed_bytes(0)
        per_request += windows.fixed_bytes(1) - windows.fixed_bytes(0)
    if scratch is not None:
        least, most = (scratch.total_bytes(requests) for requests in (1, DEFAULT_MAX_RUNNING))
        fixed += least
        per_request += max(most - least, 0) // (DEFAULT_MAX_RUNNING - 1)
    if max_running is None:
        room = SIDE_SHARE * budget_bytes - fixed
        limit = int(room // per_request) if per_request else DEFAULT_MAX_RUNNING
        max_running = max(1, min(limit, DEFAULT_MAX_RUNNING))
    if states is not None:
        max_running = max(1, min(max_running, states.requests))
    plan = MemoryPlan(geometry, max_running, budget_bytes, extend, draft_bytes, waiting, states, windows, scratch)
    # The pool needs the padding page and at least one page for a request.
    needed = plan.fixed_bytes + 2 * page_size * plan.token_bytes
    if needed > budget_bytes:
        raise Int2Error(_too_small(plan))
    return plan


def _too_small(plan: MemoryPlan) -> str:
    """What takes the budget, and what would make it less."""
    rows = f"{plan.max_running} running requests" + (f" and {plan.waiting} waiting ones" if plan.waiting else "")
    parts = [f"BF16 windows of {rows} take {plan.side_bytes / GIB:.3f} GiB"]
    remedies = ["--max-running-requests", "SGLANG_MIXED_KV_RECENT_TOKENS", "SGLANG_MIXED_KV_PREFIX_TOKENS"]
    if plan.extend is not None:
        parts.append(f"the workspace of prompts {plan.extend.total_bytes / GIB:.3f} GiB")
    if plan.scratch is not None:
        steps = plan.scratch.total_bytes(plan.max_running + plan.waiting)
        parts.append(f"the workspace of decode {steps / GIB:.3f} GiB")
    if plan.windows is not None:
        pool = plan.windows.fixed_bytes(plan.max_running)
        parts.append(f"the cache of layers with a sliding window {pool / GIB:.3f} GiB")
        remedies.append("--chunked-prefill-size")
    if plan.waiting:
        remedies.append("--disaggregation-decode-extra-slots")
    return (
        f"the KV budget of {plan.budget_bytes / GIB:.3f} GiB is too small for int2 mode: {', '.join(parts)}; lower "
        f"{', '.join(remedies[:-1])} or {remedies[-1]}, or raise --mem-fraction-static"
    )
