"""Hooks into the life of a request: prefix hits, gaining a seat, losing it.

Everything here runs on the host in the scheduler, in the same order on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar import worker
from sglang_oscar.attach import releases
from sglang_oscar.attach.feature import features
from sglang_oscar.errors import ImpossibleRequestError
from sglang_oscar.formats import origin
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.owned import SINK
from sglang_oscar.memory.saver import restore
from sglang_oscar.requests import late_kernels
from sglang_oscar.requests.ending import end

NO_STATE = "a prefix hit, but no state to go on from"


def after_compute_max_prefix_len(longest: int, self: Any, input_len: int) -> int | None:
    """Cap a prefix hit so that what it leaves to compute fills the recent window: the last ``recent`` prompt tokens.

    Where windows come back with a hit, as they do with the states of a hybrid model, nothing is computed again; where
    that of this request does, it may reach as far as that.
    A request whose embeddings are not those of its token ids must not hit: its sinks could not be computed again.
    """
    active = worker.active()
    if active is None:
        return None
    if has_own_embeddings(self):
        return 0
    if active.recompute_recent and not any(feature.restores_windows() for feature in features()):
        covered = max(feature.covered(self, input_len) for feature in features())
        longest = min(longest, max(input_len - active.windows.recent, covered))
    return max(min([longest, *(feature.longest_hit(self, input_len) for feature in features())]), 0)


def has_own_embeddings(req: Any) -> bool:
    """Whether what a request says is not in its token ids."""
    return req.input_embeds is not None or req.positional_embed_overrides is not None


def around_alloc_for_extend(original: Callable[[Any], Any], batch: Any) -> Any:
    """Give every request that gains a seat its sink block and ring; publish sink blocks that this batch fills."""
    cache = cache_of(batch.req_to_token_pool)
    if cache is None:
        return original(batch)
    late_kernels.begin(cache.seats.device)
    if cache.flushed:
        restore(cache, batch.token_to_kv_pool_allocator.get_kvcache())
    fresh = [req for req in batch.reqs if releases.seat(req) is None]
    blocks = acquire_blocks(cache, fresh)
    states = [None if cache.kept is None else releases.state_source(req) for req in fresh]
    result = original(batch)
    for req, block, state in zip(fresh, blocks, states, strict=True):
        prefix, kept = releases.prefix_tokens(req), 0
        if cache.kept is not None and prefix:
            if state is None:
                end(req, NO_STATE)
            else:
                kept = cache.plan.geometry.windows.recent
                for of in cache.holdings.values():
                    if of.carried and of.copies:
                        cache.seats.bring(of, state, releases.seat(req))
        start = max(prefix - kept, 0)
        if cache.resumed is not None:
            start = cache.resumed.take(req, releases.seat(req), prefix)
        cache.seats.assign(releases.seat(req), ring_start=start, sink_block=block)
    for req, kv_len in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        publish_sinks(cache, req, kv_len)
        if cache.resumed is not None:
            cache.resumed.prompt(req, kv_len)
    return result


def acquire_blocks(cache: Int2Cache, fresh: list[Any]) -> list[int]:
    """Sink blocks for requests about to gain a seat; those of prefix hits whose block is gone are queued for refilling.

    Shared blocks are pinned first: a private one may be had by evicting any block that nobody pins. A request that
    cannot have one gets the dummy block, and is ended.
    """
    if cache.plan.geometry.windows.sink == 0:
        return [0] * len(fresh)
    hits = [releases.prefix_tokens(req) > 0 for req in fresh]
    blocks = [hit and cache.sinks.acquire_shared(cache.sink_key(req)) for req, hit in zip(fresh, hits, strict=True)]
    for index, (req, hit) in enumerate(zip(fresh, hits, strict=True)):
        if not blocks[index]:
            try:
                blocks[index] = acquire_refilled(cache, req) if hit else cache.sinks.acquire_private()
            except ImpossibleRequestError as error:
                blocks[index] = 0
                end(req, str(error))
    return blocks  # type: ignore[return-value]


def acquire_refilled(cache: Int2Cache, req: Any) -> int:
    """A block that the next forward pass fills before anything else, shared from now on: a copy that is kept, else what
    it computes again.

    Raises:
        ImpossibleRequestError: the request has no sink that could be computed.
    """
    ids, key = cache.sink_ids(req), cache.sink_key(req)
    if ids is None:
        raise ImpossibleRequestError("a prefix hit, but its sink tokens are not known")
    if key is not None and (block := cache.sinks.acquire_shared(key)) is not None:
        return block  # queued a moment ago for a request that begins alike
    if cache.cuts_hits:
        raise ImpossibleRequestError("a prefix hit, but its sink block is gone")
    if cache.kept is not None and releases.state_source(req) is None:
        raise ImpossibleRequestError(NO_STATE)
    block = cache.sinks.acquire_private()
    if cache.kept is None:
        cache.refills.add(block, ids, cache.sink_images(req), req.lora_id)
    else:
        cache.seats.bring(cache.holdings[SINK], releases.state_source(req), block)
    if key is not None:
        cache.sinks.publish(block, key)
    return block


def publish_sinks(cache: Int2Cache, req: Any, kv_len: int) -> None:
    """Publish a request's sink block once ``kv_len`` tokens cover it.

    Readers come later in stream order than the kernels that fill the block.
    """
    if kv_len < cache.plan.geometry.windows.sink:
        return
    block, key = cache.seats.block_of(releases.seat(req)), cache.sink_key(req)
    if block and key is not None:
        cache.sinks.publish(block, key)


class ObservedSeats:
    """What stands before SGLang's own class in that of the request pool: it says when requests lose their seats."""

    def free(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """One does: publish a sink that filled up during decoding, and give back what it owns."""
        cache, seat = cache_of(self), releases.seat(req)
        if cache is not None and seat is not None:
            tokens = releases.committed_tokens(req)
            publish_sinks(cache, req, tokens)
            if cache.resumed is not None:
                cache.resumed.left(req, seat, tokens)
            cache.owned(seat, tokens).free()
            cache.seats.unassign(seat)
        return super().free(req, *args, **kwargs)  # type: ignore[misc]

    def clear(self, *args: Any, **kwargs: Any) -> Any:
        """All do, and the prefix tree is gone, so no sink block can be asked for again."""
        if (cache := cache_of(self)) is not None:
            for of in (cache.seats, cache.sinks, cache.refills):
                of.clear()
            if cache.resumed is not None:
                cache.resumed.clear()
            cache.flushed = True
            origin.note_flushed()
        return super().clear(*args, **kwargs)  # type: ignore[misc]


def observe(cache: Int2Cache) -> None:
    """Put :class:`ObservedSeats` before the class of a cache's request pool, of which SGLang has several."""
    pool = cache.req_to_token_pool
    stock = type(pool)
    pool.__class__ = type(stock.__name__, (ObservedSeats, stock), {})
