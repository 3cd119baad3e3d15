"""The pool of a model with sliding windows: SGLang's pair of pools, of which one is the INT2 pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.memory.build import Built
from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.pool import Int2TokenToKVPool


def built(of: Built) -> SWAKVPool | None:
    """The pool that SGLang gets of a model with sliding windows; None of another model."""
    if of.cache.plan.part(WindowPool) is None:
        return None
    drafts = new_tokens(releases.resolved(of.configurator.server_args)) > 0
    return pair_with_windows(of.configurator, of.sizes, of.pool, drafts)


def pair_with_windows(configurator: Any, sizes: Any, int2: Int2TokenToKVPool, drafts: bool = False) -> SWAKVPool:
    """SGLang's pair of pools with the INT2 pool as that of layers without a window; the cache is found through it.

    Args:
        configurator: SGLang's KVCacheConfigurator, of a model with sliding windows.
        sizes: its resolved pool sizes.
        int2: the INT2 pool, of ``sizes.full_max_total_num_tokens``.
        drafts: whether accepted tokens move within the pools.

    Raises:
        Int2Error: SGLang has built something else.
    """
    from sglang.srt.runtime_context import get_parallel

    model, saver = configurator.model_config, int2.memory_saver_adapter.enabled
    # It builds both from one class: the pool without windows first.
    makers: Iterator[Callable[..., Any]] = iter([lambda **_: int2, MHATokenToKVPool])

    def make(**kwargs: Any) -> Any:
        # Older releases keep both out of the memory saver's region.
        return next(makers)(**kwargs | {"enable_memory_saver": saver})

    pool = SWAKVPool(
        size=sizes.full_max_total_num_tokens,
        size_swa=sizes.swa_max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=model.dtype,
        head_num=model.get_swa_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=model.swa_head_dim,
        v_head_dim=model.swa_v_head_dim,
        swa_attention_layer_ids=model.swa_attention_layer_ids,
        full_attention_layer_ids=model.full_attention_layer_ids,
        device=configurator.device,
        enable_kv_cache_copy=drafts,
        token_to_kv_pool_class=make,
    )
    windows = pool.swa_kv_pool
    if pool.full_kv_pool is not int2 or type(windows) is not MHATokenToKVPool or windows.dtype != model.dtype:
        raise Int2Error("SGLang builds its pools of sliding windows in another way; use --kv-cache-dtype auto")
    cache = cache_of(int2)
    assert cache is not None
    cache.attach(pool)
    return pool
