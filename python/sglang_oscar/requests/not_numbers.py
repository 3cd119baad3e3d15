"""Requests that came out as NaN: they are ended, and what they have computed is neither shared nor stored.

What came out is read when SGLang reads the sampled tokens, and before it gives pages to the prefix cache
(:mod:`sglang_oscar.requests.logits_column`).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.requests.logits_column import LogitsColumn, to_host

logger = logging.getLogger(__name__)

_ATTRIBUTE = "oscar_logits"


def note(cache: Int2Cache, forward_batch: Any, output: Any) -> None:
    """Begin to copy one logit of every row of a forward pass of the model."""
    logits = getattr(output.logits_output, "next_token_logits", None)
    if logits is None or logits.numel() == 0:
        return
    tokens = len(logits) // forward_batch.batch_size if forward_batch.forward_mode.is_target_verify() else 1
    column, ready = to_host(logits[:, 0])
    cache.logits = LogitsColumn(column, tokens, ready=ready)


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
        end(cache, batch.reqs[index])


def end(cache: Int2Cache, req: Any) -> None:
    """Abort a request, and keep what it has computed to itself.

    One whose prompt is still being computed, chunk by chunk, goes on: its last chunk sees what this one does.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.finished() or req.is_retracted or req.inflight_middle_chunks > 0:
        return
    text = "the model's output is not a number (NaN), so the request was ended; what it computed is not kept"
    req.to_finish = FINISH_ABORT(text, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    req.skip_radix_cache_insert = True
    if block := cache.rows.block_of(releases.row(req)):
        cache.sinks.withdraw(block)
    logger.error("int2 request %s: %s", req.rid, text)
