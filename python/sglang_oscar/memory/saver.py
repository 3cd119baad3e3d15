"""The memory saver: a trainer on the same GPU takes the cache's memory between rollouts and gives it back.

Rows, rings and sinks are allocated in SGLang's region of the KV cache, whose addresses stay while its memory goes.
Matrices, tables and workspaces are not in it, and keep what is in them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache


def kv_region(pool: Any) -> AbstractContextManager[None]:
    """What is allocated in it is released and resumed with the rows of ``pool``, SGLang's MHATokenToKVPool."""
    found: AbstractContextManager[None] = pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
    return found


def restore(cache: Int2Cache, kv_pool: Any) -> None:
    """Before the first request behind a flush gets its seat, or a pass reads dummies: make memory what it was at start.
    SGLang flushes when memory is taken, which comes back with anything in it.

    Args:
        cache: of the server's model.
        kv_pool: SGLang's.
    """
    from sglang.srt.runtime_context import get_server_args

    cache.flushed = False
    if releases.resolved(get_server_args()).enable_memory_saver:
        clear(cache, kv_pool)


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
    torch.get_device_module(cache.window_buffers.rings[0].device).synchronize()
