"""Every place where int2 mode touches SGLang, as a list. Nothing else in this package patches anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_oscar.attach import gate
from sglang_oscar.attention import refill_pass
from sglang_oscar.calibration import dump_hook
from sglang_oscar.cpu import engine
from sglang_oscar.memory import sizing
from sglang_oscar.requests import lifecycle
from sglang_oscar.weights import absorption, updates

SRT = "sglang.srt."
ARGS = SRT + "server_args."
MEM = SRT + "mem_cache."
CONFIGURATOR = MEM + "kv_cache_configurator.KVCacheConfigurator."
ALLOCATOR = MEM + "allocator.paged.PagedTokenToKVPoolAllocator."
ROW_POOL = MEM + "memory_pool.ReqToTokenPool."
WORKER = SRT + "managers.tp_worker.BaseTpWorker."
UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
BEFORE, AFTER, AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND

Touchpoint = tuple[str, HookType, Callable[..., Any]]
"""Dotted name of a function of SGLang, kind of hook, and the hook."""

TOUCHPOINTS: list[Touchpoint] = [
    # Arguments: defaults and refusals.
    (ARGS + "prepare_server_args", AROUND, gate.around_prepare_server_args),
    (ARGS + "ServerArgs.__post_init__", AROUND, gate.around_post_init),
    (ARGS + "ServerArgs.check_server_args", BEFORE, gate.before_check_server_args),
    # Memory: dtype, bytes per token, budget, number of requests, pool.
    (MEM + "kv_cache_dtype.configure_kv_cache_dtype", AROUND, sizing.around_configure_kv_cache_dtype),
    (
        SRT + "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        AROUND,
        sizing.around_compute_cell_size,
    ),
    (CONFIGURATOR + "_profile_available_bytes", AFTER, sizing.after_profile_available_bytes),
    (CONFIGURATOR + "resolve_max_num_reqs", AROUND, sizing.around_resolve_max_num_reqs),
    (CONFIGURATOR + "_build_token_to_kv_pool", AROUND, sizing.around_build_token_to_kv_pool),
    (ARGS + "ServerArgs.post_capture_kv_sizing_planned", AFTER, sizing.after_post_capture_kv_sizing_planned),
    # Requests: prefix hits, rows, sink blocks.
    (SRT + "model_executor.model_runner.ModelRunner.forward", AROUND, refill_pass.around_model_forward),
    (
        SRT + "managers.schedule_batch.Req._compute_max_prefix_len",
        AFTER,
        lifecycle.after_compute_max_prefix_len,
    ),
    (MEM + "allocation.alloc_for_extend", AROUND, lifecycle.around_alloc_for_extend),
    (MEM + "common.release_kv_cache", BEFORE, lifecycle.before_release_kv_cache),
    (ROW_POOL + "free", BEFORE, lifecycle.before_free_row),
    (ROW_POOL + "clear", BEFORE, lifecycle.before_clear_rows),
    # Weights: the value rotation.
    (
        SRT + "model_loader.loader.DefaultModelLoader.load_weights_and_postprocess",
        AROUND,
        absorption.around_load_weights_and_postprocess,
    ),
    (WORKER + "update_weights_from_disk", AROUND, updates.around_update_from_disk),
    (WORKER + "init_weights_update_group", AROUND, updates.around_update_weights),
    (WORKER + "update_weights_from_tensor", AROUND, updates.around_update_weights),
    (WORKER + "update_weights_from_distributed", AROUND, updates.around_update_weights),
    (WORKER + "update_weights_from_ipc", AROUND, updates.around_update_weights),
    (WORKER + "send_weights_to_remote_instance", AROUND, updates.around_send_weights),
    (UPDATER + "save_remote_model", AROUND, updates.around_save_weights),
    (UPDATER + "save_sharded_model", AROUND, updates.around_save_weights),
    # Machines without a GPU.
    (SRT + "utils.common.support_triton", AROUND, engine.around_support_triton),
    (ALLOCATOR + "alloc_extend", AROUND, engine.around_alloc_extend),
    (ALLOCATOR + "alloc_decode", AROUND, engine.around_alloc_decode),
]


DUMP_TOUCHPOINTS: list[Touchpoint] = [
    (SRT + "layers.radix_attention.RadixAttention.forward", BEFORE, dump_hook.before_attention),
]
"""Calibration: dumping q, k and v. Every attention call of every model passes here, so only where a dump is wanted."""


def wanted() -> list[Touchpoint]:
    """The hooks of this process."""
    return TOUCHPOINTS + DUMP_TOUCHPOINTS if dump_hook.is_wanted() else TOUCHPOINTS


def register_all(touchpoints: list[Touchpoint]) -> None:
    """Queue hooks with SGLang's registry, which attaches them once every plugin is loaded."""
    for target, kind, hook in touchpoints:
        HookRegistry.register(target, hook, kind)
