"""Hooks into the life of a request: prefix hits, gaining a row, losing it.

Everything here runs on the host in the scheduler, in the same order on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.memory import runtime


def after_compute_max_prefix_len(longest: int, self: Any, input_len: int) -> int | None:
    """Cap a prefix hit so that what it leaves to compute fills the windows.

    The last ``recent`` prompt tokens are computed again, which fills the request's ring; a hit whose sink block
    is gone is cut to nothing, so that the sinks are computed again. Slower once, never silently worse.
    """
    state = runtime.current()
    if state is None:
        return None
    windows = state.plan.geometry.windows
    if state.settings.recompute_recent:
        longest = min(longest, input_len - windows.recent)
    if windows.sink and state.sink_key(self) not in state.sinks:
        return 0
    return max(longest, 0)


def around_alloc_for_extend(original: Callable[[Any], Any], batch: Any) -> Any:
    """Give every request that gains a row its sink block and ring; publish sink blocks that this batch fills."""
    state = runtime.current()
    if state is None:
        return original(batch)
    fresh = [req for req in batch.reqs if req.req_pool_idx is None]
    blocks = acquire_blocks(state, fresh)
    result = original(batch)
    for req, block in zip(fresh, blocks, strict=True):
        state.rows.assign(req.req_pool_idx, ring_start=len(req.prefix_indices), sink_block=block)
    for req, kv_len in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        publish_sinks(state, req, kv_len)
    return result


def acquire_blocks(state: runtime.Runtime, fresh: list[Any]) -> list[int]:
    """Sink blocks for requests about to gain a row.

    Shared blocks are pinned first: a private one may be had by evicting any block that nobody pins.

    Raises:
        RuntimeError: a prefix hit lost its sink block, which the cap on hits rules out.
    """
    if state.plan.geometry.windows.sink == 0:
        return [0] * len(fresh)
    shared = [state.sinks.acquire_shared(state.sink_key(req)) if len(req.prefix_indices) else None for req in fresh]
    for req, block in zip(fresh, shared, strict=True):
        if len(req.prefix_indices) and block is None:
            raise RuntimeError(f"request {req.rid} has a prefix hit but no sink block")
    return [state.sinks.acquire_private() if block is None else block for block in shared]


def publish_sinks(state: runtime.Runtime, req: Any, kv_len: int) -> None:
    """Publish a request's sink block once ``kv_len`` tokens cover it.

    Readers come later in stream order than the kernels that fill the block.
    """
    if kv_len < state.plan.geometry.windows.sink:
        return
    block, key = state.rows.block_of(req.req_pool_idx), state.sink_key(req)
    if block and key is not None:
        state.sinks.publish(block, key)


def before_release_kv_cache(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
    """Publish sinks that filled up during decoding, before the request's tokens enter the prefix cache."""
    state = runtime.current()
    if state is not None and req.req_pool_idx is not None:
        publish_sinks(state, req, req.kv_committed_len)


def before_free_row(self: Any, req: Any) -> None:
    """The request loses its row: unpin its sink block."""
    state = runtime.current()
    if state is None or req.req_pool_idx is None or self is not state.req_to_token_pool:
        return
    block = state.rows.unassign(req.req_pool_idx)
    if block:
        state.sinks.release(block)


def before_clear_rows(self: Any) -> None:
    """The cache is flushed: the prefix tree is gone, so no sink block can be asked for again."""
    state = runtime.current()
    if state is not None and self is state.req_to_token_pool:
        state.rows.clear()
        state.sinks.clear()
