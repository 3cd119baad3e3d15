"""A machine without a GPU: what stock SGLang lacks there."""

from __future__ import annotations

from typing import Any

from oscar_cpu import engine, hybrid_models, state_pool, state_spaces, transfer
from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import ARGS, AROUND, BEFORE, MEM, SRT, Touchpoint, at

KERNELS = "sglang.kernels.ops."
STATES = KERNELS + "mamba.mamba_state_scatter_triton."
ALLOCATOR = MEM + "allocator.paged.PagedTokenToKVPoolAllocator."
DRAFTS = SRT + "speculative.draft_utils.DraftBackendFactory."


def of_host_states(name: str) -> tuple[str, ...]:
    """Where releases have a method of the host pool of states."""
    return at(*(f"{MEM}{module}.MambaPoolHost.{name}" for module in ("pool_host.mamba", "memory_pool_host")))


def prepare_worker(model: Any) -> None:
    """Bring attention for layers with a sliding window."""
    if model.is_hybrid_swa:
        from oscar_cpu import window_attention

        window_attention.register()


FEATURE = Feature(
    name="cpu",
    in_arguments=[
        Touchpoint(
            at(
                SRT + "arg_groups.mamba_hook.validate_mamba_extra_buffer",
                ARGS + "ServerArgs._validate_mamba_extra_buffer",
            ),
            AROUND,
            hybrid_models.around_validate_extra_buffer,
        ),
    ],
    in_schedulers=[
        Touchpoint(at(SRT + "utils.common.support_triton"), AROUND, engine.around_support_triton),
        Touchpoint(
            at(SRT + "managers.cache_controller.HiCacheController.__init__"), BEFORE, engine.before_cache_controller
        ),
        Touchpoint(of_host_states("__init__"), AROUND, state_pool.around_init),
        Touchpoint(of_host_states("load_to_device_per_layer"), AROUND, state_pool.around_load),
        Touchpoint(of_host_states("backup_from_device_all_layer"), AROUND, state_pool.around_back_up),
        Touchpoint(at(DRAFTS + "create_decode_backend"), AROUND, engine.around_create_decode_backend),
        Touchpoint(at(DRAFTS + "create_draft_extend_backend"), AROUND, engine.around_create_extend_backend),
        Touchpoint(at(SRT + "disaggregation.utils.get_kv_class"), AROUND, transfer.around_get_kv_class),
        Touchpoint(at(MEM + "allocation.get_last_loc"), AROUND, engine.around_get_last_loc),
    ],
    # Linear attention, and pages without Triton.
    in_every_scheduler=[
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
        Touchpoint(
            at(SRT + "layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend.__init__"),
            BEFORE,
            state_spaces.before_backend,
        ),
        Touchpoint(at(STATES + "track_mamba_states_if_needed"), AROUND, hybrid_models.around_track_states),
        Touchpoint(at(STATES + "track_mamba_states_all_layers"), AROUND, hybrid_models.around_track_all_states),
        Touchpoint(at(STATES + "scatter_mamba_states_after_mtp_verify"), AROUND, hybrid_models.around_scatter_verified),
    ],
    configure=transfer.configure,
    prepare_worker=prepare_worker,
)
