"""Where the KV budget goes: INT2 rows, BF16 side buffers for as many requests as may run, a workspace for extend.

Stock SGLang would admit 2,048 and more requests; each takes a BF16 window here (36 MiB on Qwen3-8B), so the number
of running requests is derived from the budget before the history pool is sized from what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oscar_kernels.cache import Windows
from oscar_kernels.format import LayerFormat, SideFormat, mean_bits
from oscar_kernels.layout import EXACT, EXACT_DTYPES, RowLayout
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.workspace import Workspace
from sglang_oscar.names import DEFAULT_GROUP_SIZE, GROUP_SIZE
from sglang_oscar.settings import Settings
from sglang_oscar.sliding_windows.plan import WindowPool

if TYPE_CHECKING:
    from sglang_oscar.hybrids.states import StateSlots

DEFAULT_MAX_RUNNING = 256
SIDE_SHARE = 0.2
"""Largest share of the budget that side buffers take when --max-running-requests is not given."""
GIB = 1 << 30


@dataclass(frozen=True)
class Geometry:
    """What one token, one window and one sink block cost, over all layers of this rank.

    Args:
        formats: of the layers on this rank, with the heads of this rank, by global layer id. Rows may differ from layer
            to layer and between keys and values.
        windows: sizes of the 16-bit windows.
        window_dtype: dtype of the windows.
    """

    formats: Mapping[int, LayerFormat]
    windows: Windows
    window_dtype: torch.dtype

    @classmethod
    def uniform(cls, layout: RowLayout, windows: Windows, window_dtype: torch.dtype, layers: int) -> Geometry:
        """Of ``layers`` layers whose keys and values all have rows of one layout."""
        side = SideFormat(layout.group_size, layout.scale_dtype, layout.bits, exact_dtype=layout.exact_dtype)
        return cls(
            dict.fromkeys(range(layers), LayerFormat(layout.kv_heads, layout.head_dim, side, side)),
            windows,
            window_dtype,
        )

    @property
    def any_layer(self) -> LayerFormat:
        """For what all layers of a model have in common."""
        return next(iter(self.formats.values()))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in the history pool: K and V rows of all layers."""
        return sum(layer.cell_bytes for layer in self.formats.values())

    @property
    def elements(self) -> int:
        """K and V channels of one token over all layers."""
        return sum(layer.elements for layer in self.formats.values())

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token in 16 bits: K and V of all layers."""
        return self.elements * self.window_dtype.itemsize

    @property
    def ring_bytes(self) -> int:
        """Bytes of one request's recent ring."""
        return self.windows.ring * self.full_token_bytes

    @property
    def sink_bytes(self) -> int:
        """Bytes of one sink block."""
        return self.windows.sink * self.full_token_bytes

    def bits_per_element(self, tokens: int) -> float:
        """Effective bits per KV element of one request of ``tokens`` tokens, its windows included."""
        return 8 * (tokens * self.cell_bytes + self.ring_bytes + self.sink_bytes) / (tokens * self.elements)


@dataclass(frozen=True)
class MemoryPlan:
    """How many requests may run, what their side buffers take, and what extend takes (None: nothing).

    ``draft_bytes`` are those of a token in the cache of a draft model, 0 where there is none. ``waiting`` counts
    further requests that hold a window: on a decode server those whose prompts are on their way. ``states`` are those
    of a hybrid model's linear layers; the budget is what they leave. ``windows`` is what layers with a sliding window
    need, None where there are none.
    """

    geometry: Geometry
    max_running: int
    budget_bytes: int
    extend: Workspace | None = None
    draft_bytes: int = 0
    waiting: int = 0
    states: StateSlots | None = None
    windows: WindowPool | None = None

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
        return self.side_bytes + windows + (0 if self.extend is None else self.extend.total_bytes)

    def lines(self, tokens: int) -> list[str]:
        """The start-up account.

        Args:
            tokens: capacity of the history pool.
        """
        geometry = self.geometry
        bits = ", ".join(f"{geometry.bits_per_element(n * 1024):.2f} at {n}K" for n in (8, 32, 128))
        full = tokens * geometry.full_token_bytes
        sides = [side for layer in geometry.formats.values() for _, side in layer.sides]
        sizes = sorted({side.group_size for side in sides if side.bits != EXACT})
        groups = f"group {', '.join(map(str, sizes))}; " if sizes else ""
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

    Raises:
        Int2Error: the side buffers leave no room for history.
    """
    per_request = geometry.ring_bytes + 2 * geometry.sink_bytes
    fixed = geometry.ring_bytes + geometry.sink_bytes + waiting * per_request
    if windows is not None:
        fixed += windows.fixed_bytes(0)
        per_request += windows.fixed_bytes(1) - windows.fixed_bytes(0)
    if max_running is None:
        room = SIDE_SHARE * budget_bytes - fixed
        limit = int(room // per_request) if per_request else DEFAULT_MAX_RUNNING
        max_running = max(1, min(limit, DEFAULT_MAX_RUNNING))
    if states is not None:
        max_running = max(1, min(max_running, states.requests))
    plan = MemoryPlan(geometry, max_running, budget_bytes, extend, draft_bytes, waiting, states, windows)
    # The pool needs the padding page and at least one page for a request.
    needed = plan.fixed_bytes + 2 * page_size * plan.token_bytes
    if needed > budget_bytes:
        raise Int2Error(
            f"the KV budget of {budget_bytes / GIB:.3f} GiB is too small for int2 mode: BF16 windows of {max_running} "
            f"running requests take {plan.side_bytes / GIB:.3f} GiB, "
            f"extend {(plan.fixed_bytes - plan.side_bytes) / GIB:.3f} GiB; lower --max-running-requests, "
            "SGLANG_MIXED_KV_RECENT_TOKENS or SGLANG_MIXED_KV_PREFIX_TOKENS, or raise --mem-fraction-static"
        )
    return plan


def row_layout(args: Any, settings: Settings, model: Any, kv_heads: int) -> RowLayout:
    """Row geometry from flags and model. A side that is left exact has the model's 16-bit dtype, or that of the windows
    where the model computes in float32.

    Raises:
        Int2Error: --kv-cache-quant-group-size does not fit the model's head_dim.
    """
    group_size = getattr(args, GROUP_SIZE)
    if group_size is None:
        group_size = min(DEFAULT_GROUP_SIZE, model.head_dim)
    exact = model.dtype if model.dtype in EXACT_DTYPES else settings.window_torch_dtype
    try:
        return RowLayout(kv_heads, model.head_dim, group_size, settings.scale_torch_dtype, exact_dtype=exact)
    except ValueError as error:
        raise Int2Error(f"--kv-cache-quant-group-size {group_size}: {error}") from None


def own_heads(model: Any) -> slice:
    """The kv heads of a model that this tensor-parallel rank keeps.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Fewer kv heads than ranks: neighbouring ranks keep the same one.
    first = parallel.attn_tp_rank * model.get_total_num_kv_heads() // parallel.attn_tp_size
    return slice(first, first + model.get_num_kv_heads(parallel.attn_tp_size))
