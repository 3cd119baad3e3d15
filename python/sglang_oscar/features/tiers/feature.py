"""Rows in host memory and in storage: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, MEM, SRT, UPDATER, Touchpoint, at
from sglang_oscar.features.tiers import arguments, hooks, weights

STORAGE = MEM + "storage.backend_factory.StorageBackendFactory."
CONTROLLER = SRT + "managers.cache_controller.HiCacheController."

FEATURE = Feature(
    name="tiers",
    in_schedulers=[
        Touchpoint(at(MEM + "pool_host.mha.get_mha_host_pool_cls"), AROUND, hooks.around_get_mha_host_pool_cls),
        Touchpoint(
            at(
                SRT + "speculative.base_spec_worker._can_pack_hicache_mtp",
                MEM + "kv_cache_builder.maybe_register_hicache_draft",
            ),
            AROUND,
            hooks.around_can_pack,
        ),
        Touchpoint(at(STORAGE + "create_backend"), AROUND, hooks.around_create_backend),
        Touchpoint(at(CONTROLLER + "_generic_page_get"), AROUND, hooks.around_page_get),
        Touchpoint(at(CONTROLLER + "_generic_page_set"), AROUND, hooks.around_page_set),
        Touchpoint(at(MEM + "utils.get_hash_str"), AROUND, hooks.around_get_hash_str),
        Touchpoint(at(UPDATER + "_observe_weight_load"), AROUND, weights.around_observe_weight_load),
    ],
    refused=arguments.REFUSED,
    settle=weights.note_before_loading,
    built=weights.note_loaded,
)
