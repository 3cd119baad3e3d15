"""Requests that came out as NaN: they are ended, and what they have computed is neither shared nor stored.

What came out is read when SGLang reads the sampled tokens, and before it gives pages to the prefix cache
(:mod:`sglang_oscar.memory.logits_column`). With overlap scheduling it shares a chunk of a prompt before it reads the
chunk's result, so the result of a chunk is waited for: the GPU is idle while the next chunk is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar import metrics
from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.logits_column import LogitsColumn, take
from sglang_oscar.requests.ending import end, is_ended

_ATTRIBUTE = "oscar_logits"
"""Of SGLang's result: the logits that belong to it."""
_CHUNK = "oscar_chunk"
"""Of SGLang's request: the logits of its last chunk, and its place in the batch."""


def note(cache: Int2Cache, forward_batch: Any, output: Any) -> None:
    """Begin to look at the logits of a forward pass of the model."""
    logits = getattr(output.logits_output, "next_token_logits", None)
    if logits is None or logits.numel() == 0:
        return
    tokens = len(logits) // forward_batch.batch_size if forward_batch.forward_mode.is_target_verify() else 1
    cache.logits = take(logits, tokens)


def after_run_batch(result: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Lay the logits beside the result that they belong to, and beside the request whose prompt goes on."""
    cache = cache_of(self.tree_cache.req_to_token_pool)
    if cache is not None and cache.logits is not None:
        setattr(result, _ATTRIBUTE, cache.logits)
        if self.chunked_req in batch.reqs:
            setattr(self.chunked_req, _CHUNK, (cache.logits, batch.reqs.index(self.chunked_req)))
        cache.logits = None


def around_checkpoint(original: Callable[..., None], req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang shares what a request has computed so far: end the request if that is NaN, so that it is not shared.

    An earlier chunk was not NaN when it was shared, so it may stay.
    """
    cache = cache_of(tree_cache.req_to_token_pool)
    column, index = req.__dict__.pop(_CHUNK, (None, 0))
    if cache is not None and column is not None and index in column.broken([1] * (index + 1)):
        end_broken(cache, req)
    original(req, tree_cache, *args, **kwargs)
    if cache is not None and is_ended(req):
        releases.go_on_behind_chunk(req, tree_cache.req_to_token_pool)


def before_process_batch_result(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> None:
    """End requests that came out as NaN before SGLang puts their pages into the prefix cache."""
    column: LogitsColumn | None = getattr(result, _ATTRIBUTE, None)
    cache = cache_of(self.tree_cache.req_to_token_pool)
    if column is None or cache is None:
        return
    lengths = [1] * len(batch.reqs)
    if column.tokens > 1 and column.accepted is None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        lengths = result.accept_lens.tolist()
    for index in column.broken(lengths):
        if not is_left_alone(batch.reqs[index]):
            end_broken(cache, batch.reqs[index])


def is_left_alone(req: Any) -> bool:
    """Whether a result says nothing of a request: it is over, or a chunk of its prompt, which
    :func:`around_checkpoint` looks at.
    """
    return bool(req.finished() or req.is_retracted or req.inflight_middle_chunks > 0)


def end_broken(cache: Int2Cache, req: Any) -> None:
    """End a request, unless it was ended at an earlier chunk, and let nobody else find its sink block."""
    if is_ended(req):
        return
    end(req, "the model's output is not a number (NaN)")
    metrics.count("broken_requests")
    if block := cache.rows.block_of(releases.row(req)):
        cache.sinks.withdraw(block)
