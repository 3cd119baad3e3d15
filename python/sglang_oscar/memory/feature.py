"""Memory: sizes, the pool, and what a server says of it."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AFTER, AROUND, CONFIGURATOR, MEM, SCHEDULER, SRT, Touchpoint, at
from sglang_oscar.memory import facts, owned, sizing

FEATURE = Feature(
    name="memory",
    in_schedulers=[
        Touchpoint(at(MEM + "kv_cache_dtype.configure_kv_cache_dtype"), AROUND, sizing.around_configure_kv_cache_dtype),
        Touchpoint(
            at(SRT + "model_executor.pool_configurator.create_memory_pool_configurator"),
            AROUND,
            sizing.around_create_configurator,
        ),
        Touchpoint(at(CONFIGURATOR + "_build_token_to_kv_pool"), AROUND, sizing.around_build_token_to_kv_pool),
        Touchpoint(at(SCHEDULER + "get_internal_state"), AFTER, facts.after_get_internal_state),
    ],
    owns=owned.of_every_server,
)
