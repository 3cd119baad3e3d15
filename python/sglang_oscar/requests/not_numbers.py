"""Requests that came out as NaN: they are ended, and what they have computed is neither shared nor stored.

What came out is read when SGLang reads the sampled tokens, and before it gives pages to the prefix cache
(:mod:`sglang_oscar.memory.logits_column`).
"""

from __future__ import annotations

from typing import Any

from sglang_oscar import metrics
from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.logits_column import LogitsColumn, take
from sglang_oscar.requests.ending import end

_ATTRIBUTE = "oscar_logits"


def note(cache: Int2Cache, forward_batch: Any, output: Any) -> None:
    """Begin to look at the logits of a forward pass of the model."""
    logits = getattr(output.logits_output, "next_token_logits", None)
    if logits is None or logits.numel() == 0:
        return
    tokens = len(logits) // forward_batch.batch_size if forward_batch.forward_mode.is_target_verify() else 1
    cache.logits = take(logits, tokens)


def after_run_batch(result: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Lay the logits beside the result that they belong to."""
    cache = cache_of(self.tree_cache.req_to_token_pool)
    if cache is not None and cache.logits is not None:
        setattr(result, _ATTRIBUTE, cache.logits)
        cache.logits = None


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
        if not goes_on(batch.reqs[index]):
            end(batch.reqs[index], "the model's output is not a number (NaN)")
            metrics.count("broken_requests")
            withdraw_sink(cache, batch.reqs[index])


def goes_on(req: Any) -> bool:
    """Whether a request is left alone: it is over, or its prompt is still being computed, chunk by chunk. Then its last
    chunk sees what this one does.
    """
    return bool(req.finished() or req.is_retracted or req.inflight_middle_chunks > 0)


def withdraw_sink(cache: Int2Cache, req: Any) -> None:
    """Let nobody else find the request's sink block."""
    if block := cache.rows.block_of(releases.row(req)):
        cache.sinks.withdraw(block)
