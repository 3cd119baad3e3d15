"""Recent windows beside those of requests: copied when a prompt is computed and when a request ends, and brought back
with a prefix hit.

A copy of a finished request is made at once, on the scheduler's stream, for which batches wait: what its last step
(it may still run) writes to its ring is a position behind the copy. That of a prompt is made before the next batch, on
the stream of batches.

The scheduler looks for a request's prefix hit in the same round in which the request gains its seat; one that gains
none is looked up again. So a window that a hit counts on is pinned until the round's batch runs, whatever becomes of
the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.features.resuming.store import Window, WindowStore
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.seat_tables import uploaded
from sglang_oscar.memory.units import Units

_ATTRIBUTE = "oscar_window"
"""Of SGLang's request: the window that its prefix hit may reach into."""


@dataclass
class _Pending:
    """A prompt's window that is to be copied from the ring of a seat once the prompt is computed."""

    seat: int
    start: int
    space: Any
    ids: list[int]


@dataclass
class Resumed:
    """Args:
    cache: whose rings are copied.
    copies: room for copies of them, [2 * layers, windows, ring, kv_heads, head_dim] each, in their dtype.
    """

    cache: Int2Cache
    copies: list[torch.Tensor]
    _next: list[_Pending] = field(default_factory=list)
    _due: list[_Pending] = field(default_factory=list)
    _brought: list[tuple[int, int]] = field(default_factory=list)
    _starts: dict[int, int] = field(default_factory=dict)
    _of_seat: dict[int, Window] = field(default_factory=dict)
    _moved: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.store = WindowStore(self.copies[0].shape[1])
        self._rings, self._copies = Units(self.cache.window_buffers.rings), Units(self.copies)

    def covered(self, req: Any, input_len: int) -> int:
        """Tokens up to which a hit of a request of ``input_len`` tokens may reach; 0 where no window helps. Behind what
        it leaves to compute, all of the recent window is exact.
        """
        window = None
        if _may_be_kept(req):
            ids = [*req.origin_input_ids, *req.output_ids][:input_len]
            window = self.store.find(releases.namespace(req), ids, max(input_len - self._recent, 0))
            if window is not None and len(window.ids) <= input_len - self._recent:
                window = None  # a hit that long leaves a whole window to compute
            elif window is not None:
                self.store.pin(window)
        setattr(req, _ATTRIBUTE, window)
        return 0 if window is None else len(window.ids)

    def take(self, req: Any, seat: int, prefix: int) -> int:
        """Let a request with a hit of ``prefix`` tokens, that has gained a seat, go on from its window.

        Returns:
            the first position that its ring holds.
        """
        window: Window | None = getattr(req, _ATTRIBUTE, None)
        start = prefix
        if window is not None and prefix > window.start:
            assert self.store.holds(window), "SGLang gave a seat for a prefix hit of an earlier round"
            start = window.start
            self._brought.append((window.slot, seat))
        self._starts[seat] = start
        self._of_seat.pop(seat, None)
        return start

    def prompt(self, req: Any, tokens: int) -> None:
        """The batch that is about to run computes a request up to ``tokens``: its window is kept if that is all."""
        seat = releases.seat(req)
        if tokens != len(req.origin_input_ids) + len(req.output_ids) or not _may_be_kept(req):
            return
        if ids := self._whole_pages(req, tokens):
            start = max(self._starts[seat], tokens - self._ring)
            self._next.append(_Pending(seat, start, releases.namespace(req), ids))

    def left(self, req: Any, seat: int, tokens: int) -> None:
        """A request, ``tokens`` of which are computed, is about to leave its seat."""
        if self._moved is not None:  # by a batch that may still run: slots change hands
            torch.cuda.current_stream().wait_event(self._moved)
        waiting = [one for one in self._due if one.seat == seat]
        self._due = [one for one in self._due if one.seat != seat]
        self._next = [one for one in self._next if one.seat != seat]
        prompt = self._of_seat.pop(seat, None)
        start = self._starts.pop(seat, tokens)
        if not _may_be_kept(req):
            if prompt is not None:
                self.store.drop(prompt)
            return
        for one in waiting:
            self._keep([one])
            self._of_seat.pop(seat, None)
        # With overlap scheduling a step is under way, which computes one token more.
        start = max(start, tokens + 1 - self._ring)
        if req.finished() and (ids := self._whole_pages(req, tokens)) and start < len(ids):
            self._keep([_Pending(seat, start, releases.namespace(req), ids)])
            self._of_seat.pop(seat, None)

    def move(self) -> None:
        """Before the tables of a batch: bring what it goes on from, and then, as that may take its place, copy what is
        due."""
        moves = bool(self._brought or self._due)
        if self._brought:
            self._rings.copy(self._copies, *self._uploaded(self._brought))
            self._brought = []
        self.store.unpin()
        self._keep(self._due)
        self._due, self._next = self._next, []
        if moves and self.cache.seats.device.type == "cuda":
            self._moved = torch.cuda.Event()
            self._moved.record()

    def clear(self) -> None:
        """No request is left, and the prefix tree is gone."""
        self.store.clear()
        for of in (self._next, self._due, self._brought, self._starts, self._of_seat):
            of.clear()

    @property
    def _recent(self) -> int:
        return self.cache.plan.geometry.windows.recent

    @property
    def _ring(self) -> int:
        return self.cache.plan.geometry.windows.ring

    def _whole_pages(self, req: Any, tokens: int) -> list[int]:
        """Tokens of a request up to the end of its last whole page."""
        ids = [*req.origin_input_ids, *req.output_ids]
        return ids[: min(tokens, len(ids)) // self.cache.page_size * self.cache.page_size]

    def _keep(self, pending: list[_Pending]) -> None:
        pairs = []
        for one in pending:
            if one.start < len(one.ids) and (window := self.store.add(one.space, one.ids, one.start)) is not None:
                self._of_seat[one.seat] = window
                pairs.append((one.seat, window.slot))
        # Of two copies to one slot the later one counts.
        pairs = list({slot: (seat, slot) for seat, slot in pairs}.values())
        if pairs:
            self._copies.copy(self._rings, *self._uploaded(pairs))

    def _uploaded(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        return uploaded(list(zip(*pairs, strict=True)), self.cache.seats.device)


def _may_be_kept(req: Any) -> bool:
    """Whether a request is what its token ids say, and may share what it computes."""
    said = req.input_embeds is None and req.positional_embed_overrides is None
    images = getattr(req, "multimodal_inputs", None)
    return said and images is None and not getattr(req, "skip_radix_cache_insert", False)
