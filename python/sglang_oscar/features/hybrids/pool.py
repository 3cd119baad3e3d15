"""SGLang's pool of a hybrid model around the INT2 pool of its full attention layers."""

from __future__ import annotations

from typing import Any

from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.pool import Int2TokenToKVPool


def around_int2_pool(configurator: Any, pool: Int2TokenToKVPool, req_to_token_pool: Any) -> Any:
    """The pool that SGLang gets: its HybridLinearKVPool of a hybrid model, else the INT2 pool itself.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        pool: of the full attention layers.
        req_to_token_pool: SGLang's request pool, which has the states.
    """
    if configurator.mambaish_config is None:
        return pool
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    hybrid = HybridLinearKVPool(
        size=pool.size,
        dtype=pool.dtype,
        page_size=pool.page_size,
        head_num=pool.head_num,
        head_dim=pool.head_dim,
        full_attention_layer_ids=list(pool.formats),
        device=pool.device,
        mamba_pool=req_to_token_pool.mamba_pool,
        start_layer=configurator.layer_info.start_layer,
        full_kv_pool=pool,
    )
    cache = cache_of(pool)
    assert cache is not None
    cache.attach(hybrid)
    return hybrid
