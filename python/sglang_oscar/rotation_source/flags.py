"""What of a server's command line goes to the server that records for its calibration."""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

from sglang_oscar.attach import releases

KEPT = tuple(
    """
    tokenizer_path tokenizer_mode tokenizer_backend trust_remote_code revision download_dir context_length dtype
    quantization load_format json_model_override_args decrypted_config_file model_config_parser
    model_loader_extra_config custom_weight_loader quantization_param_path torchao_config rl_quant_profile
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads tp_size ep_size
    moe_dense_tp_size base_gpu_id gpu_id_step numa_node mem_fraction_static cpu_offload_gb moe_runner_backend
    moe_a2a_backend fp4_gemm_runner_backend fp8_gemm_runner_backend bf16_gemm_backend disable_shared_experts_fusion
    disable_flashinfer_autotune disable_custom_all_reduce enable_p2p_check
    enforce_disable_flashinfer_allreduce_fusion enable_multimodal language_model_only mm_attention_backend
    enable_fp32_lm_head max_mamba_cache_size mamba_ssm_dtype mamba_backend linear_attn_backend swa_full_tokens_ratio
    mamba_full_memory_ratio kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
    kt_max_deferred_experts_per_token
    """.split()  # noqa: SIM905
)
"""Fields of ServerArgs that say how the model is loaded and computed, and where. What says how requests are served
(drafts, tiers, disaggregation, replicas, ports, logs) means nothing to a recording, or is refused by it."""


@cache
def parser() -> argparse.ArgumentParser:
    """SGLang's own parser of server arguments."""
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def recording_flags(args: Any) -> list[str]:
    """Flags that give :data:`KEPT` the values that they have in server arguments; those at their default are left out.

    Args:
        args: server arguments as the operator gave them.
    """
    from sglang.srt.server_args import ServerArgs

    defaults = releases.field_defaults(ServerArgs)
    actions = {action.dest: action for action in parser()._actions}
    flags: list[str] = []
    for name in KEPT:
        value = getattr(args, name, None)
        if name not in actions or value is None or value == defaults.get(name):
            continue
        if name == "load_format" and value == "dummy":
            # Rotations are kept by the checkpoint's weights; a trainer sends those, or what becomes of them, later.
            continue
        option, takes = actions[name].option_strings[0], actions[name].nargs
        if takes == 0:
            flags += [option] if value else []
        else:
            flags += [option, *map(str, value if isinstance(value, list | tuple) else [value])]
    return flags
