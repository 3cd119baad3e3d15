"""Configurations that int2 mode must refuse: flags, variables, rotation files and models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    DeepseekV3Config,
    Gemma2Config,
    Lfm2Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLMoeConfig,
)

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import recipe_rotation
from support.models import COMMON

K, V = "SGLANG_OSCAR_K_ROTATION_PATH", "SGLANG_OSCAR_V_ROTATION_PATH"
LAYERS, HEAD_DIM = COMMON["num_hidden_layers"], COMMON["head_dim"]

FLAGS = [
    "--speculative-algorithm EAGLE",
    "--speculative-algorithm EAGLE --device cuda",
    "--speculative-algorithm NEXTN",
    "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 2 "
    "--speculative-num-draft-tokens 4",
    "--speculative-algorithm EAGLE3 --enable-multi-layer-eagle",
    "--speculative-algorithm EAGLE --speculative-draft-attention-backend fa4",
    "--speculative-algorithm STANDALONE --speculative-draft-model-path draft",
    "--speculative-algorithm FROZEN_KV_MTP",
    "--speculative-algorithm DFLASH",
    "--speculative-algorithm NGRAM --enable-torch-compile",
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 65",
    "--speculative-algorithm NGRAM --speculative-adaptive",
    "--pp-size 2",
    "--enable-dp-attention --dp-size 2 --tp-size 2",
    "--dcp-size 2",
    "--attn-cp-size 2 --tp-size 2",
    "--enable-prefill-cp",
    "--disaggregation-mode prefill --disaggregation-transfer-backend mori",
    "--disaggregation-mode prefill --speculative-algorithm NGRAM",
    "--disaggregation-mode prefill --enable-hierarchical-cache",
    "--disaggregation-mode decode --disaggregation-decode-enable-radix-cache",
    "--disaggregation-mode decode --disaggregation-decode-enable-offload-kvcache",
    "--enable-streaming-session",
    "--enable-hierarchical-cache --hicache-mem-layout page_head",
    "--enable-hierarchical-cache --hicache-mem-layout page_first_kv_split",
    "--enable-hierarchical-cache --hicache-io-backend kernel_ascend",
    "--enable-hierarchical-cache --hicache-storage-backend aibrix",
    "--enable-hierarchical-cache --hicache-storage-backend nixl --hicache-mem-layout layer_first",
    "--enable-hierarchical-cache --speculative-algorithm NGRAM",
    '--enable-hierarchical-cache --hicache-storage-backend-extra-config {"tp_lcm_size":4}',
    "--enable-lmcache",
    "--enable-flexkv",
    "--flexkv-config-file flexkv.yml",
    "--radix-cache-backend flexkv",
    "--enable-hisparse",
    "--enable-page-major-kv-layout",
    "--enable-unified-memory",
    "--enable-pdmux",
    "--enable-two-batch-overlap",
    "--dllm-algorithm LowConfidence",
    "--enable-memory-saver",
    "--enable-torch-compile",
    "--enable-torch-compile --disable-decode-cuda-graph",
    "--enable-torch-compile --cuda-graph-backend-decode breakable",
    "--cuda-graph-backend-prefill full",
    "--load-format presharded",
    "--remote-instance-weight-loader-start-seed-via-transfer-engine",
    "--load-format remote_instance",
    "--checkpoint-engine-wait-weights-before-ready",
    "--model-impl transformers",
    "--use-ray",
    "--enable-lora",
    "--lora-paths a=/nonexistent",
    "--weight-cache-mode daemon",
    "--elastic-ep-backend nixl",
    "--enable-elastic-expert-backup",
    "--kv-canary log",
    "--prefill-only-disable-kv-cache",
    "--encoder-only",
    "--language-only",
    "--enable-adaptive-dispatch-to-encoder",
    "--enable-mis",
    "--enable-deterministic-inference",
    "--rl-on-policy-target fsdp",
    "--page-size 100",
    "--page-size 8",
    "--page-size 32",
    "--page-size 256 --chunked-prefill-size 384",
    "--kv-cache-quant-group-size 48",
    "--kv-cache-quant-group-size 128",
    "--kv-cache-quant-group-size 16",
    "--kv-cache-quant-group-size 0",
    "--kv-cache-quant-group-size -64",
]

RECENT_FLAGS = {
    "enable_pd_role_switch": "--disaggregation-mode decode --enable-pd-role-switch",
    "disaggregation_decode_retraction_backup": (
        "--disaggregation-mode decode --disaggregation-decode-retraction-backup host_pool"
    ),
    "disaggregation_decode_host_receive_threshold": (
        "--disaggregation-mode decode --disaggregation-decode-host-receive-threshold 0.5"
    ),
    "disaggregation_decode_allocation_policy": (
        "--disaggregation-mode decode --disaggregation-decode-allocation-policy prefill_complete"
    ),
    "speculative_draft_kv_cache_dtype": "--speculative-algorithm EAGLE --speculative-draft-kv-cache-dtype fp8_e4m3",
    "startup_weight_load_mode": "--startup-weight-load-mode overlap",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
    "hicache_host_memory_mode": "--enable-hierarchical-cache --hicache-host-memory-mode buffer_only",
    "attn_dp_size": "--attn-dp-size 2 --tp-size 2",
    "disaggregation_enable_kv_checksum": "--disaggregation-mode decode --disaggregation-enable-kv-checksum",
    "enable_kv_cache_sharding": "--disaggregation-mode prefill --enable-kv-cache-sharding",
    "enable_nvidia_megakernel": "--enable-nvidia-megakernel",
}
"""Command lines by the server argument that not all releases have."""

VARIABLES = [
    ("SGLANG_OSCAR_K_CLIP_RATIO", "0"),
    ("SGLANG_OSCAR_K_CLIP_RATIO", "1.5"),
    ("SGLANG_OSCAR_V_CLIP_RATIO", "-0.1"),
    ("SGLANG_OSCAR_V_CLIP_RATIO", "nan"),
    ("SGLANG_OSCAR_V_CLIP_RATIO", "high"),
    ("SGLANG_OSCAR_ABSORB_V_ROTATION", "maybe"),
    ("SGLANG_MIXED_KV_PREFIX_TOKENS", "48"),
    ("SGLANG_MIXED_KV_RECENT_TOKENS", "-1"),
    ("SGLANG_MIXED_KV_HP_DTYPE", "float32"),
    ("SGLANG_MIXED_KV_SCALE_DTYPE", "int8"),
    ("SGLANG_MIXED_KV_HP_MAX_SPLITS", "0"),
    ("SGLANG_OSCAR_DECODE_BACKEND", "cuda"),
    ("SGLANG_OSCAR_EXTEND_BACKEND", "flashinfer"),
    ("SGLANG_OSCAR_EXTEND_BACKEND", "fa3"),
    ("SGLANG_OSCAR_K_ROTATION", "hadamard"),
    ("SGLANG_MIXED_KV_SINK_TOKENS", "64"),
    (K, ""),
    (V, ""),
    ("DUMP_KVCACHE", "1"),
    ("DUMP_KVCACHE_TOKENS", "none"),
]

SMALL = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODEL_CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "mla": (
        lambda: DeepseekV3Config(**SMALL, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64),
        "DeepseekV3ForCausalLM",
        "latent attention",
    ),
    "sliding": (lambda: Gemma2Config(**SMALL, head_dim=64), "Gemma2ForCausalLM", "sliding-window"),
    "dual chunk": (
        lambda: Qwen2Config(**SMALL, dual_chunk_attention_config={"chunk_size": 64, "local_size": 32}),
        "Qwen2ForCausalLM",
        "dual-chunk",
    ),
    "multimodal": (Qwen2VLConfig, "Qwen2VLForConditionalGeneration", "multimodal"),
    "multimodal experts": (Qwen3VLMoeConfig, "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoe"),
    "embedding": (BertConfig, "BertModel", "embedding"),
    "reward": (lambda: Qwen3Config(**SMALL, head_dim=64), "Qwen3ForRewardModel", "reward"),
    "hybrid": (lambda: Lfm2Config(**SMALL | {"hidden_size": 256}), "Lfm2ForCausalLM", "hybrid linear"),
    "head_dim": (lambda: Qwen3Config(**SMALL, head_dim=80), "Qwen3ForCausalLM", "head_dim"),
}


def broken_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Rotation files that the model cannot use: case -> (variable, path)."""

    def write(name: str, layers: int = LAYERS, head_dim: int = HEAD_DIM, side: str = "k") -> Path:
        path = folder / f"{side}_{name}.pt"
        save_rotation_file(path, recipe_rotation("hadamard", num_layers=layers, head_dim=head_dim, side=side))
        return path

    def damage(name: str, change: Callable[[torch.Tensor], None], side: str = "k") -> Path:
        path = write(name, side=side)
        content = torch.load(path, weights_only=True)
        change(next(iter(content["layers"].values()))["rotation"])
        torch.save(content, path)
        return path

    truncated, garbage = write("truncated"), folder / "garbage.pt"
    truncated.write_bytes(truncated.read_bytes()[:-500])
    garbage.write_bytes(b"not a file of tensors")
    return {
        "missing": (K, str(folder / "nowhere.pt")),
        "folder": (V, str(folder)),
        "truncated": (K, str(truncated)),
        "garbage": (V, str(garbage)),
        "nan": (K, str(damage("nan", lambda r: r[3, 5].fill_(float("nan"))))),
        "not_orthogonal": (V, str(damage("scaled", lambda r: r.mul_(1.01), side="v"))),
        "wrong_shape": (K, str(write("shape", head_dim=2 * HEAD_DIM))),
        "wrong_layer_count": (V, str(write("layers", layers=LAYERS - 1, side="v"))),
        "swapped": (V, str(write("swapped"))),
    }
