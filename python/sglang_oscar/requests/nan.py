"""Requests that came out as NaN: they are ended, and what they have computed is neither shared nor stored.

What came out is read when SGLang reads the sampled tokens. With overlap scheduling it begins the next step before, so
chunks of a prompt enter the prefix cache behind their results: of a chunk that nobody has read yet, nothing is shared.
Where the prefix cache also holds what only the newest chunk has, a state or a window, the result is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar import metrics
from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.logits_column import LogitsColumn, from_device, take
from sglang_oscar.requests.ending import end, is_ended

_ATTRIBUTE = "oscar_logits"
"""Of SGLang's result: the logits that belong to it."""
_CHUNK = "oscar_chunk"
"""Of SGLang's result: the :class:`Chunk` in its batch whose prompt goes on."""
_UNREAD = "oscar_unread"
"""Of SGLang's request: its chunks whose results nobody has read, the oldest first."""


@dataclass(eq=False)
class Chunk:
    """Part of a prompt that goes on, behind ``start`` tokens; row ``index`` of the ``logits`` of its batch is its. In a
    pipeline these come later, from the last stage."""

    req: Any
    start: int
    logits: LogitsColumn | None
    index: int

    @property
    def broken(self) -> bool:
        """Whether it came out as NaN; waits for it."""
        assert self.logits is not None
        return self.index in self.logits.broken([1] * (self.index + 1))


def note(cache: Int2Cache, forward_batch: Any, output: Any) -> None:
    """Begin to look at the logits of a forward pass of the model."""
    logits = getattr(output.logits_output, "next_token_logits", None)
    if logits is None or logits.numel() == 0:
        return
    tokens = len(logits) // forward_batch.batch_size if forward_batch.forward_mode.is_target_verify() else 1
    cache.logits = take(logits, tokens)


def after_run_batch(result: Any, self: Any, batch: Any) -> None:
    """Lay the logits beside the result that they belong to, and beside the request whose prompt goes on."""
    cache = cache_of(self.tree_cache.req_to_token_pool)
    if cache is None:
        return
    column, cache.logits = cache.logits, None
    if column is not None:
        setattr(result, _ATTRIBUTE, column)
    elif getattr(result, "pp_hidden_states_proxy_tensors", None) is None:
        return  # nor will another stage say what came out
    req = self.chunked_req
    if req in batch.reqs:
        chunk = Chunk(req, releases.prefix_tokens(req), column, batch.reqs.index(req))
        req.__dict__.setdefault(_UNREAD, []).append(chunk)
        setattr(batch if column is None else result, _CHUNK, chunk)


def hand_on(result: Any, batch: Any) -> torch.Tensor | None:
    """In a pipeline: another object will be the result of a batch. The logits that are to lie beside it, on the
    device; None where there are none."""
    if (chunk := getattr(result, _CHUNK, None)) is not None:
        setattr(batch, _CHUNK, chunk)
    column: LogitsColumn | None = getattr(result, _ATTRIBUTE, None)
    return None if column is None else column.on_device


def lay_beside(result: Any, batch: Any, logits: torch.Tensor) -> None:
    """In a pipeline, on every stage: ``logits`` [requests], from the last one, are of this result of a batch."""
    column = from_device(logits, 1)
    setattr(result, _ATTRIBUTE, column)
    if (chunk := batch.__dict__.pop(_CHUNK, None)) is not None:
        chunk.logits = column
        setattr(result, _CHUNK, chunk)


def around_checkpoint(original: Callable[..., None], req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang shares what a request has computed so far: only chunks whose results were read, and none of a request that
    is ended. An earlier chunk was not NaN when it was shared, so it may stay.
    """
    cache = cache_of(tree_cache.req_to_token_pool)
    unread: list[Chunk] = req.__dict__.get(_UNREAD, [])
    if cache is not None and unread and has_newest_only(tree_cache):
        read(cache, *unread)
    if unread and not is_ended(req):
        releases.share_up_to(unread[0].start, original, req, tree_cache, *args, **kwargs)
    else:
        original(req, tree_cache, *args, **kwargs)
    if cache is not None and (unread or is_ended(req)):
        releases.go_on_behind_chunk(req, tree_cache.req_to_token_pool)


def has_newest_only(tree_cache: Any) -> bool:
    """Whether a prefix cache must be given a chunk before the next one begins: the slot of a hybrid model's state is
    the next chunk's, and a pool of sliding windows is not sized for the windows of two.
    """
    return bool(tree_cache.supports_mamba() or tree_cache.supports_swa())


def read(cache: Int2Cache, *chunks: Chunk) -> None:
    """Look at results of chunks; what has come out as numbers may be shared."""
    for chunk in chunks:
        if chunk in (unread := chunk.req.__dict__.get(_UNREAD, [])):
            unread.remove(chunk)
        if chunk.broken and not is_over(chunk.req):
            end_broken(cache, chunk.req)


def before_process_batch_result(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> None:
    """End requests that came out as NaN before SGLang puts their pages into the prefix cache."""
    column: LogitsColumn | None = getattr(result, _ATTRIBUTE, None)
    cache = cache_of(self.tree_cache.req_to_token_pool)
    if column is None or cache is None:
        return
    if (chunk := getattr(result, _CHUNK, None)) is not None:
        read(cache, chunk)
    lengths = [1] * len(batch.reqs)
    if column.tokens > 1 and column.accepted is None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        lengths = result.accept_lens.tolist()
    for index in column.broken(lengths):
        req = batch.reqs[index]
        if not is_over(req) and req.inflight_middle_chunks <= 0:  # else a chunk, which :func:`read` looks at
            end_broken(cache, req)


def is_over(req: Any) -> bool:
    """Whether a request has lost its seat since its result began to be computed."""
    return bool(req.finished() or req.is_retracted)


def end_broken(cache: Int2Cache, req: Any) -> None:
    """End a request, unless it was ended at an earlier chunk, and let nobody else find its sink block."""
    if is_ended(req):
        return
    seat = releases.seat(req)
    owned = "" if seat is None else cache.owned(seat, releases.committed_tokens(req))
    end(req, "the model's output is not a number (NaN)", owned)
    metrics.count("broken_requests")
    if block := cache.seats.block_of(seat):
        cache.sinks.withdraw(block)
