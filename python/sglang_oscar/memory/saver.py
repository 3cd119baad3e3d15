"""The memory saver: a trainer on the same GPU takes the cache's memory between rollouts and gives it back.

Rows, rings and sinks are allocated in SGLang's region of the KV cache, whose addresses stay while its memory goes.
Matrices, tables and workspaces are not in it, and keep what is in them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from sglang_oscar.memory.cache import Int2Cache, cache_of


def kv_region(pool: Any) -> AbstractContextManager[None]:
    """What is allocated in it is released and resumed with the rows of ``pool``, SGLang's MHATokenToKVPool."""
    found: AbstractContextManager[None] = pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    return found


def after_resume(result: Any, self: Any, recv_req: Any) -> None:
    """The memory is back, with anything in it: make it what it was at start, before graphs read dummies again.

    Args:
        result: SGLang's answer.
        self: its SchedulerWeightUpdaterManager.
        recv_req: its request; no tags are all tags.
    """
    runner = self.tp_worker.model_runner
    cache = cache_of(runner.req_to_token_pool)
    if cache is not None and (not recv_req.tags or GPU_MEMORY_TYPE_KV_CACHE in recv_req.tags):
        clear(cache, runner.token_to_kv_pool)


def clear(cache: Int2Cache, kv_pool: Any) -> None:
    """Zero what requests own, the table of their slots, and windows in a pool of SGLang's; no request runs.

    Args:
        cache: of the server's model.
        kv_pool: SGLang's; where it is a pair, the other half has the windows.
    """
    units = [group for of in cache.holdings.values() for group in of.units.groups]
    windows = getattr(kv_pool, "swa_kv_pool", None)
    beside = [] if windows is None else [*windows.k_buffer, *windows.v_buffer]
    for tensor in (cache.req_to_token_pool.req_to_token, *units, *beside):
        tensor.zero_()
    # The next batch may run on another stream.
    torch.get_device_module(cache.window_buffers.ring.device).synchronize()
