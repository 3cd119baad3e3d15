"""Every place where int2 mode touches SGLang, as lists: what is hooked in which processes of a server.

A hook costs the start of a process: SGLang's module is imported, and every module is searched for other names of the
function. So the process that launches a server gets only what it runs itself, and a server that does not ask for int2
nothing else (:mod:`sglang_oscar.attach.processes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from oscar_cpu import engine, hybrid_models, transfer
from sglang_oscar import metrics
from sglang_oscar.attach import gate, releases
from sglang_oscar.attention import refill_pass
from sglang_oscar.features.disaggregation import handshake, retraction, waiting
from sglang_oscar.features.folding import absorption, updates
from sglang_oscar.features.hybrids import sizing as hybrid_sizing
from sglang_oscar.features.recording import dump_hook
from sglang_oscar.features.sliding_windows import attention as window_attention
from sglang_oscar.features.sliding_windows import prefix_hits
from sglang_oscar.features.sliding_windows import sizing as window_sizing
from sglang_oscar.features.speculation import arguments as speculation
from sglang_oscar.features.speculation import commit
from sglang_oscar.features.tiers import hooks as tiers
from sglang_oscar.memory import facts, sizing
from sglang_oscar.requests import lifecycle, nan

SRT = "sglang.srt."
ARGS = SRT + "server_args."
MEM = SRT + "mem_cache."
KERNELS = "sglang.kernels.ops."
STATES = KERNELS + "mamba.mamba_state_scatter_triton."
CONFIGURATOR = MEM + "kv_cache_configurator.KVCacheConfigurator."
ALLOCATOR = MEM + "allocator.paged.PagedTokenToKVPoolAllocator."
ROW_POOL = MEM + "memory_pool.ReqToTokenPool."
SCHEDULER = SRT + "managers.scheduler.Scheduler."
WORKER = SRT + "managers.tp_worker.BaseTpWorker."
RUNNER = SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater."
UPDATER = SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
DRAFTS = SRT + "speculative.draft_utils.DraftBackendFactory."
REQUEST = SRT + "managers.schedule_batch.Req."
DECODE = SRT + "disaggregation.decode."
BEFORE, AFTER, AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND


class Touchpoint(NamedTuple):
    """A function of SGLang and what happens around it.

    ``targets`` are the dotted names that it has in the supported releases: the first that the installed one has is
    hooked. Where it has none, that is reported like a hook that does not attach, unless the function is ``recent``:
    then older releases lack what it does.
    """

    targets: tuple[str, ...]
    kind: HookType
    hook: Callable[..., Any]
    recent: bool = False

    @property
    def name(self) -> str:
        """The first target, by which the row is told from others."""
        return self.targets[0]

    def target(self) -> str | None:
        """The function to hook in the installed release; None where there is nothing to hook."""
        found = releases.first_existing(self.targets)
        return found if found or self.recent else self.name


def at(*targets: str) -> tuple[str, ...]:
    """Names of a function in the supported releases, those to be preferred first."""
    return targets


RESOLUTION = at(ARGS + "ServerArgs.resolve_once", ARGS + "ServerArgs.__post_init__")

ARGUMENTS: list[Touchpoint] = [
    Touchpoint(at(ARGS + "prepare_server_args"), AROUND, gate.around_prepare_server_args),
    Touchpoint(RESOLUTION, AROUND, gate.around_resolution),
    Touchpoint(at(ARGS + "ServerArgs.check_server_args"), BEFORE, gate.before_check_server_args),
    Touchpoint(
        at(
            SRT + "arg_groups.overrides.post_capture_kv_sizing_planned",
            ARGS + "ServerArgs.post_capture_kv_sizing_planned",
        ),
        AFTER,
        sizing.after_post_capture_kv_sizing_planned,
    ),
    Touchpoint(at(SRT + "arg_groups.speculative_hook._handle_ngram"), AROUND, speculation.around_handle_ngram),
]
"""Arguments: defaults and refusals. In every process."""

TAKEN_NAME: list[Touchpoint] = [Touchpoint(RESOLUTION, BEFORE, gate.before_resolution_of_taken_name)]
"""All that is hooked where SGLang itself has a cache dtype of our name."""


SERVING: list[Touchpoint] = [
    # Memory: dtype, bytes per token, budget, number of requests, pool, what a server says of it.
    Touchpoint(at(MEM + "kv_cache_dtype.configure_kv_cache_dtype"), AROUND, sizing.around_configure_kv_cache_dtype),
    Touchpoint(
        at(SRT + "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"),
        AROUND,
        sizing.around_compute_cell_size,
    ),
    Touchpoint(
        at(SRT + "model_executor.pool_configurator.DefaultPoolConfigurator.__init__"),
        AFTER,
        sizing.after_pool_configurator,
    ),
    Touchpoint(at(CONFIGURATOR + "_profile_available_bytes"), AFTER, sizing.after_profile_available_bytes),
    Touchpoint(at(CONFIGURATOR + "_handle_max_mamba_cache"), AROUND, hybrid_sizing.around_handle_max_mamba_cache),
    Touchpoint(at(CONFIGURATOR + "resolve_max_num_reqs"), AROUND, sizing.around_resolve_max_num_reqs),
    Touchpoint(at(CONFIGURATOR + "_build_token_to_kv_pool"), AROUND, sizing.around_build_token_to_kv_pool),
    Touchpoint(at(SCHEDULER + "init_metrics_collector"), AFTER, metrics.after_init_metrics_collector),
    Touchpoint(at(SCHEDULER + "get_internal_state"), AFTER, facts.after_get_internal_state),
    # Requests: prefix hits, rows, sink blocks.
    Touchpoint(at(SRT + "model_executor.model_runner.ModelRunner.forward"), AROUND, refill_pass.around_model_forward),
    Touchpoint(
        at(REQUEST + "_compute_max_prefix_len"),
        AFTER,
        lifecycle.after_compute_max_prefix_len,
    ),
    Touchpoint(at(MEM + "allocation.alloc_for_extend"), AROUND, lifecycle.around_alloc_for_extend),
    Touchpoint(at(MEM + "common.release_kv_cache"), BEFORE, lifecycle.before_release_kv_cache),
    Touchpoint(at(SCHEDULER + "run_batch"), AFTER, nan.after_run_batch),
    Touchpoint(at(SCHEDULER + "process_batch_result"), BEFORE, nan.before_process_batch_result),
    Touchpoint(
        at(MEM + "common.checkpoint_kv_cache", MEM + "common.maybe_cache_unfinished_req"),
        AROUND,
        nan.around_checkpoint,
    ),
    Touchpoint(at(ROW_POOL + "free"), BEFORE, lifecycle.before_free_row),
    Touchpoint(at(ROW_POOL + "clear"), BEFORE, lifecycle.before_clear_rows),
    # Layers with a sliding window beside the INT2 cache.
    Touchpoint(
        at(SRT + "layers.attention.attention_registry.attn_backend_wrapper"), AROUND, window_attention.around_wrapper
    ),
    Touchpoint(
        at(SRT + "model_executor.pool_configurator.create_memory_pool_configurator"),
        AROUND,
        window_sizing.around_create_configurator,
    ),
    Touchpoint(at(MEM + "common.free_swa_out_of_window_slots"), AROUND, prefix_hits.around_free_out_of_window),
    # Weights: the value rotation.
    Touchpoint(at(SRT + "model_executor.model_runner.ModelRunner.load_model"), AROUND, absorption.around_load_model),
    Touchpoint(
        at(SRT + "model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"),
        AROUND,
        absorption.around_load_weights_and_postprocess,
    ),
    Touchpoint(at(RUNNER + "update_weights_from_disk"), AROUND, updates.around_update_from_disk),
    Touchpoint(at(WORKER + "init_weights_update_group"), AROUND, updates.around_update_weights),
    Touchpoint(
        at(WORKER + "update_weights_from_tensor", RUNNER + "update_weights_from_tensor"),
        AROUND,
        updates.around_update_weights,
    ),
    Touchpoint(
        at(WORKER + "update_weights_from_distributed", RUNNER + "load_weights_from_distributed"),
        AROUND,
        updates.around_update_weights,
    ),
    Touchpoint(
        at(WORKER + "update_weights_from_ipc", RUNNER + "update_weights_from_ipc"),
        AROUND,
        updates.around_update_weights,
    ),
    Touchpoint(at(UPDATER + "update_weights_from_tensor"), AROUND, updates.around_update_from_tensor),
    Touchpoint(at(UPDATER + "begin_weight_update"), AROUND, updates.around_begin_update, recent=True),
    Touchpoint(at(WORKER + "send_weights_to_remote_instance"), AROUND, updates.around_send_weights),
    Touchpoint(at(UPDATER + "save_remote_model"), AROUND, updates.around_save_weights),
    Touchpoint(at(UPDATER + "save_sharded_model"), AROUND, updates.around_save_weights),
    # Speculative decoding.
    Touchpoint(
        at(SRT + "speculative.spec_utils.move_accept_tokens_to_target_kvcache"),
        AROUND,
        commit.around_move_accept_tokens,
    ),
    # Tiers below the GPU.
    Touchpoint(at(MEM + "pool_host.mha.get_mha_host_pool_cls"), AROUND, tiers.around_get_mha_host_pool_cls),
    Touchpoint(
        at(MEM + "storage.backend_factory.StorageBackendFactory.create_backend"), AROUND, tiers.around_create_backend
    ),
    Touchpoint(
        at(SRT + "managers.cache_controller.HiCacheController._generic_page_get"), AROUND, tiers.around_page_get
    ),
    Touchpoint(
        at(SRT + "managers.cache_controller.HiCacheController._generic_page_set"), AROUND, tiers.around_page_set
    ),
    Touchpoint(at(MEM + "utils.get_hash_str"), AROUND, tiers.around_get_hash_str),
    # Prefill and decode on servers of their own.
    Touchpoint(at(SRT + "disaggregation.utils.setup_state_kv_args"), AROUND, handshake.around_setup_state),
    Touchpoint(at(DECODE + "DecodePreallocQueue._pre_alloc"), AROUND, waiting.around_pre_alloc),
    Touchpoint(
        at(DECODE + "DecodePreallocQueue._check_if_req_exceed_kv_capacity"), AROUND, waiting.around_check_capacity
    ),
    Touchpoint(at(DECODE + "DecodeReqToTokenPool.free"), BEFORE, lifecycle.before_free_row),
    Touchpoint(at(DECODE + "DecodeReqToTokenPool.clear"), BEFORE, lifecycle.before_clear_rows),
    Touchpoint(at(REQUEST + "offload_kv_cache"), BEFORE, retraction.before_offload),
    Touchpoint(at(REQUEST + "load_kv_cache"), AFTER, retraction.after_load),
]
"""Schedulers of int2 mode."""


CPU_SERVING: list[Touchpoint] = [
    Touchpoint(at(SRT + "utils.common.support_triton"), AROUND, engine.around_support_triton),
    Touchpoint(
        at(SRT + "managers.cache_controller.HiCacheController.__init__"), BEFORE, engine.before_cache_controller
    ),
    Touchpoint(at(DRAFTS + "create_decode_backend"), AROUND, engine.around_create_decode_backend),
    Touchpoint(at(DRAFTS + "create_draft_extend_backend"), AROUND, engine.around_create_extend_backend),
    Touchpoint(at(SRT + "disaggregation.utils.get_kv_class"), AROUND, transfer.around_get_kv_class),
    Touchpoint(at(MEM + "allocation.get_last_loc"), AROUND, engine.around_get_last_loc),
]
"""Schedulers of int2 mode on a machine without a GPU."""


DUMPING: list[Touchpoint] = [
    Touchpoint(at(SRT + "layers.radix_attention.RadixAttention.forward"), BEFORE, dump_hook.before_attention),
]
"""Calibration: dumping q, k and v. Every attention call of every model passes here, so only where a dump is wanted."""


CPU_ARGUMENTS: list[Touchpoint] = [
    Touchpoint(
        at(
            SRT + "arg_groups.mamba_hook.validate_mamba_extra_buffer",
            ARGS + "ServerArgs._validate_mamba_extra_buffer",
        ),
        AROUND,
        hybrid_models.around_validate_extra_buffer,
    ),
]
"""Arguments, on a machine without a GPU. In every process."""


CPU_MODELS: list[Touchpoint] = [
    Touchpoint(at(ALLOCATOR + "alloc_extend"), AROUND, engine.around_alloc_extend),
    Touchpoint(at(ALLOCATOR + "alloc_decode"), AROUND, engine.around_alloc_decode),
    Touchpoint(
        at(KERNELS + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward"),
        AROUND,
        hybrid_models.around_gated_norm,
    ),
    Touchpoint(at(KERNELS + "attention.fla.layernorm_gated.layernorm_fn"), AROUND, hybrid_models.around_layernorm),
    Touchpoint(
        at(KERNELS + "elementwise.elementwise.fused_gate_sigmoid_mul_add"), AROUND, hybrid_models.around_add_gated
    ),
    Touchpoint(at(STATES + "track_mamba_states_if_needed"), AROUND, hybrid_models.around_track_states),
    Touchpoint(at(STATES + "track_mamba_states_all_layers"), AROUND, hybrid_models.around_track_all_states),
]
"""What schedulers of any mode need on a machine without a GPU: linear attention, and pages without Triton."""


def of_arguments() -> list[Touchpoint]:
    """The hooks of every process."""
    return ARGUMENTS + (CPU_ARGUMENTS if _on_cpu() else [])


def of_scheduler(int2: bool) -> list[Touchpoint]:
    """What a scheduler has beside them.

    Args:
        int2: whether its server may serve in int2 mode.
    """
    on_cpu = _on_cpu()
    serving = SERVING + (CPU_SERVING if on_cpu else []) if int2 else []
    return serving + (CPU_MODELS if on_cpu else []) + (DUMPING if dump_hook.is_wanted() else [])


def _on_cpu() -> bool:
    from sglang.srt.utils import is_cpu

    return bool(is_cpu())


def absent(touchpoints: list[Touchpoint]) -> list[str]:
    """Functions that the installed release lacks, of those that are to be hooked."""
    return [point.name for point in touchpoints if not point.recent and releases.first_existing(point.targets) is None]


def register_all(touchpoints: list[Touchpoint]) -> list[str]:
    """Queue hooks with SGLang's registry, which attaches them once every plugin is loaded.

    Returns:
        the functions that are to be hooked.
    """
    queued = []
    for point in touchpoints:
        if (target := point.target()) is not None:
            HookRegistry.register(target, point.hook, point.kind)
            queued.append(target)
    return queued
