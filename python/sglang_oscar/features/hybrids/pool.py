"""SGLang's pool of a hybrid model around the INT2 pool of its full attention layers."""

from __future__ import annotations

from typing import Any

from sglang_oscar.features.hybrids.kept_windows import KeptWindows
from sglang_oscar.memory.build import Built


def built(of: Built) -> Any:
    """The pool that SGLang gets of a hybrid model, its HybridLinearKVPool; None of another model. Where states of
    prefixes are kept, copies of windows are from now on."""
    configurator, pool, cache = of.configurator, of.pool, of.cache
    if configurator.mambaish_config is None:
        return None
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    if cache.plan.copies:
        rows = cache.req_to_token_pool.req_to_token.shape[0]
        cache.kept = KeptWindows(cache.side, rows, cache.plan.sink_blocks)
    hybrid = HybridLinearKVPool(
        size=pool.size,
        dtype=pool.dtype,
        page_size=pool.page_size,
        head_num=pool.head_num,
        head_dim=pool.head_dim,
        full_attention_layer_ids=list(pool.formats),
        device=pool.device,
        mamba_pool=cache.req_to_token_pool.mamba_pool,
        start_layer=configurator.layer_info.start_layer,
        full_kv_pool=pool,
    )
    cache.attach(hybrid)
    return hybrid
