"""SGLang's pool of a hybrid model around the INT2 pool of its full attention layers."""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import disaggregated
from sglang_oscar.features.hybrids.kept_windows import KeptWindows
from sglang_oscar.features.hybrids.window_slots import WindowSlots
from sglang_oscar.formats.cached_layers import linear_config
from sglang_oscar.memory.build import Built
from sglang_oscar.memory.owned import STATE, Holding
from sglang_oscar.memory.units import Units


@cache
def serves_hybrid() -> bool:
    """Whether this process serves a hybrid model. In a worker only."""
    from sglang.srt.runtime_context import get_server_args

    return linear_config(releases.model_config(get_server_args())) is not None


def owns(built: Built) -> dict[str, Holding]:
    """The states of linear layers that a request writes, which SGLang moves; nothing of another model."""
    if built.configurator.mambaish_config is None:
        return {}
    table = built.cache.req_to_token_pool
    states = table.mamba_pool.mamba_cache
    return {
        STATE: Holding(
            units=Units([*states.conv, states.temporal]),
            of=lambda seat, tokens: table.req_index_to_mamba_index_mapping[seat : seat + 1].tolist(),
        )
    }


def built(of: Built) -> Any:
    """The pool that SGLang gets of a hybrid model, its HybridLinearKVPool; None of another model. Where states of
    prefixes are kept, copies of windows are from now on."""
    configurator, pool, int2 = of.configurator, of.pool, of.cache
    if configurator.mambaish_config is None:
        return None
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    if int2.plan.copies:
        int2.kept = KeptWindows(int2)
        # Of a server that computes prompts alone SGLang would send them with states, to one that has none.
        if releases.carries_slot_states() and not disaggregated(releases.resolved(configurator.server_args)):
            int2.req_to_token_pool.mamba_pool.register_slot_state(WindowSlots(int2))
    hybrid = HybridLinearKVPool(
        size=pool.size,
        dtype=pool.dtype,
        page_size=pool.page_size,
        head_num=pool.head_num,
        head_dim=pool.head_dim,
        full_attention_layer_ids=list(pool.formats),
        device=pool.device,
        mamba_pool=int2.req_to_token_pool.mamba_pool,
        start_layer=configurator.layer_info.start_layer,
        full_kv_pool=pool,
    )
    int2.attach(hybrid)
    return hybrid
