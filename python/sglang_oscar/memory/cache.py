"""The INT2 cache of one KV pool: who asks for rows, rings, sinks or formats finds them here, through the pool.

There is no cache of the process: a draft model's pool, or the one inside a hybrid model's, lives beside another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.format import LayerFormat
from sglang_oscar.attach import releases
from sglang_oscar.memory.images import SinkImages, sink_images
from sglang_oscar.memory.layer import AnyLayer, CachedLayer
from sglang_oscar.memory.logits_column import LogitsColumn
from sglang_oscar.memory.owned import Holding, Owned
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.memory.seat_tables import SeatTables
from sglang_oscar.memory.sink_refill import SinkRefills
from sglang_oscar.memory.sink_store import SinkStore
from sglang_oscar.memory.window_buffers import WindowBuffers
from sglang_oscar.settings import Settings

_ATTRIBUTE = "oscar_cache"


class Kept(Protocol):
    """Keeps what comes back with prefix hits, so that no token is computed again for it."""

    def await_loaded(self) -> None:
        """Before anything kept is read: wait until the host tier has brought it."""

    def keep_chunk(self, forward_batch: Any) -> StoreSlots | None:
        """Before chunks are stored, once seats are uploaded; where their tokens go a second time."""

    def keep_decoded(self, forward_batch: Any) -> None:
        """Behind a step of decode."""

    def keep_verified(self, seats: torch.Tensor, slots: torch.Tensor) -> None:
        """Behind a step of verification, of requests in ``seats`` in copies ``slots``: int64 [requests] each."""

    def keep_moved(self) -> None:
        """The same again, once accepted tokens have moved."""


class Resumed(Protocol):
    """Keeps recent windows for requests that go on from them (:mod:`sglang_oscar.features.resuming`)."""

    def take(self, req: Any, seat: int, prefix: int) -> int:
        """A request gains a seat; the first position that its ring holds."""

    def prompt(self, req: Any, tokens: int) -> None:
        """A batch is about to compute a request up to so many tokens."""

    def left(self, req: Any, seat: int, tokens: int) -> None:
        """A request is about to leave its seat."""

    def clear(self) -> None:
        """None is left."""


class Sampler(Protocol):
    """Sees queries, keys and values of prompts, where it is asked to."""

    def begin(self, forward_batch: Any) -> bool:
        """Whether it wants to see a batch of chunks."""

    def add(self, call: Any) -> None:
        """A layer of that batch, a :class:`sglang_oscar.attention.call.Call`."""


@dataclass
class Int2Cache:
    """Everything that belongs to one INT2 pool.

    ``layers`` maps the ids of the model's attention layers to their tensors and formats; ``fingerprint`` is that of the
    formats of the whole model (:func:`oscar_kernels.format.fingerprint`), the same on all ranks; ``seats`` says which
    ring and sink block a request's seat has, ``sinks`` who owns which block, ``refills`` which blocks are to be
    computed again; with ``cuts_hits`` none ever is, and hits whose block is gone are none; ``recipe`` is what the
    rotations are of, ``key_errors`` what errors keys had at their fit, by layer id, None where the file does not say;
    ``kept`` are copies of windows, None where prefix hits compute the newest tokens again; ``resumed`` keeps windows of
    plain models, None where it is not asked to; ``sampler`` sees traffic; ``derived`` say for a layer and a new format
    of it, on its device, which objects kernels have made of the old one, each beside what is made of the new one;
    ``logits`` are of the last forward pass, until its result takes them; ``flushed`` says that all requests have left
    and none has come since; ``window_buffers`` holds the tensors of rings
    and sinks; ``holdings`` are what requests own units of, by name; ``req_to_token_pool`` and ``page_size`` (tokens)
    are SGLang's.
    """

    settings: Settings
    plan: MemoryPlan
    page_size: int
    req_to_token_pool: Any
    seats: SeatTables
    sinks: SinkStore
    layers: dict[int, AnyLayer]
    fingerprint: str
    window_buffers: WindowBuffers
    recipe: str = ""
    key_errors: Mapping[int, float] | None = None
    refills: SinkRefills = field(default_factory=SinkRefills)
    cuts_hits: bool = False
    kept: Kept | None = None
    resumed: Resumed | None = None
    sampler: Sampler | None = None
    derived: list[Callable[[CachedLayer, LayerFormat], Iterable[tuple[Any, Any]]]] = field(default_factory=list)
    logits: LogitsColumn | None = None
    flushed: bool = False
    holdings: dict[str, Holding] = field(default_factory=dict)

    def attach(self, kv_pool: Any) -> None:
        """Make the cache findable from SGLang's KV pool and from its request pool."""
        setattr(kv_pool, _ATTRIBUTE, self)
        setattr(self.req_to_token_pool, _ATTRIBUTE, self)

    def owned(self, seat: int, tokens: int) -> Owned:
        """What the request in a seat of SGLang's request pool owns, of which that many tokens are computed."""
        return Owned(seat, tokens, self.holdings)

    def sink_ids(self, req: Any) -> tuple[int, ...] | None:
        """Token ids of a request's sink; None if it is too short to have one.

        A request with overridden embeddings has none either: its content is not what its token ids say.
        """
        size = self.plan.geometry.windows.sink
        ids = list(req.origin_input_ids[:size])
        if len(ids) < size:
            ids += list(req.output_ids[: size - len(ids)])
        overridden = req.input_embeds is not None or req.positional_embed_overrides is not None
        return None if size == 0 or len(ids) < size or overridden else tuple(ids)

    def sink_images(self, req: Any) -> SinkImages | None:
        """Images of which a request's sink holds tokens; None where it holds text."""
        return sink_images(req, self.plan.geometry.windows.sink)

    def sink_key(self, req: Any) -> Hashable | None:
        """Key under which a request's sink block is shared; None if it has none or must not share it."""
        ids = self.sink_ids(req)
        if ids is None or getattr(req, "skip_radix_cache_insert", False):
            return None
        images = self.sink_images(req)
        return (*releases.namespace(req), ids, images and images.key)


def cache_of(pool: Any) -> Int2Cache | None:
    """The INT2 cache of a KV pool or a request pool of SGLang; None where the pool is stock."""
    return getattr(pool, _ATTRIBUTE, None)
