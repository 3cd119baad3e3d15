"""Starts that int2 mode must refuse, and what the one line says: flags, variables, rotation files and models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from transformers import (
    BertConfig,
    Cohere2VisionConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Lfm2Config,
    Qwen2Config,
    Qwen3Config,
)

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import recipe_rotation
from sglang_oscar.attach.releases import field_defaults
from support.models import COMMON

FIELDS = field_defaults(ServerArgs)
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
    "--pp-size 2 --speculative-algorithm NGRAM",
    "--pp-size 2 --attn-dp-size 2 --tp-size 2" if "attn_dp_size" in FIELDS else "--pp-size 2 --enable-lora",
    "--enable-dp-attention --dp-size 2 --tp-size 2 --speculative-algorithm NGRAM",
    "--enable-dp-attention --dp-size 2 --tp-size 2 --enable-hierarchical-cache",
    "--enable-dp-attention --dp-size 2 --tp-size 2 --disaggregation-mode prefill",
    "--enable-dp-attention --dp-size 2 --tp-size 2 --enable-torch-compile",
    "--enable-dp-attention --dp-size 2 --tp-size 2 --enable-lora",
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
    "--enable-hierarchical-cache --hicache-storage-backend nixl --speculative-algorithm EAGLE",
    '--enable-hierarchical-cache --hicache-storage-backend-extra-config {"tp_lcm_size":4}',
    "--enable-hierarchical-cache --hicache-storage-backend file --enable-lora",
    "--enable-hierarchical-cache --hicache-storage-backend file --lora-paths a=/nonexistent",
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
    "--enable-memory-saver --device cpu",
    "--enable-memory-saver --enable-hierarchical-cache",
    "--enable-memory-saver --disaggregation-mode decode",
    "--enable-torch-compile",
    "--enable-torch-compile --disable-decode-cuda-graph",
    "--enable-torch-compile --cuda-graph-backend-decode breakable",
    "--cuda-graph-backend-prefill full",
    "--model-impl transformers",
    "--use-ray",
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
    "speculative_draft_kv_cache_dtype": "--speculative-algorithm EAGLE --speculative-draft-kv-cache-dtype fp8_e5m2",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
    "hicache_host_memory_mode": "--enable-hierarchical-cache --hicache-host-memory-mode buffer_only",
    "attn_dp_size": "--attn-dp-size 2 --tp-size 2 --speculative-algorithm NGRAM",
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
    "capped logits": (lambda: Gemma2Config(**SMALL, head_dim=64), "Gemma2ForCausalLM", "soft-capping"),
    "dual chunk": (
        lambda: Qwen2Config(**SMALL, dual_chunk_attention_config={"chunk_size": 64, "local_size": 32}),
        "Qwen2ForCausalLM",
        "dual-chunk",
    ),
    "multimodal": (Cohere2VisionConfig, "Cohere2VisionForConditionalGeneration", "multimodal"),
    "images in both directions": (Gemma3Config, "Gemma3ForConditionalGeneration", "both directions within images"),
    "embedding": (BertConfig, "BertModel", "embedding"),
    "reward": (lambda: Qwen3Config(**SMALL, head_dim=64), "Qwen3ForRewardModel", "reward"),
    "hybrid": (lambda: Lfm2Config(**SMALL | {"hidden_size": 256}), "Lfm2ForCausalLM", "hybrid linear"),
    "head_dim": (lambda: Qwen3Config(**SMALL, head_dim=80), "Qwen3ForCausalLM", "head_dim"),
}


BROKEN_FILES = {
    "missing": (K, "nowhere.pt"),
    "folder": (V, ""),
    "truncated": (K, "k_truncated.pt"),
    "garbage": (V, "garbage.pt"),
    "nan": (K, "k_nan.pt"),
    "not_orthogonal": (V, "v_scaled.pt"),
    "wrong_shape": (K, "k_shape.pt"),
    "wrong_layer_count": (V, "v_layers.pt"),
    "swapped": (V, "k_swapped.pt"),
}
"""Rotation files that the model cannot use: variable, and file of :func:`write_files`."""


def write_files(folder: Path) -> None:
    """Broken rotation files, and a folder for each of the models."""

    def write(name: str, layers: int = LAYERS, head_dim: int = HEAD_DIM, side: str = "k") -> Path:
        path = folder / f"{side}_{name}.pt"
        save_rotation_file(path, recipe_rotation("hadamard", num_layers=layers, head_dim=head_dim, side=side))
        return path

    def damage(name: str, change: Callable[[torch.Tensor], Any], side: str = "k") -> None:
        path = write(name, side=side)
        content = torch.load(path, weights_only=True)
        change(next(iter(content["layers"].values()))["rotation"])
        torch.save(content, path)

    truncated = write("truncated")
    truncated.write_bytes(truncated.read_bytes()[:-500])
    (folder / "garbage.pt").write_bytes(b"not a file of tensors")
    damage("nan", lambda r: r[3, 5].fill_(float("nan")))
    damage("scaled", lambda r: r.mul_(1.01), side="v")
    write("shape", head_dim=2 * HEAD_DIM)
    write("layers", layers=LAYERS - 1, side="v")
    write("swapped")
    for name, (config, architecture, _) in MODEL_CASES.items():
        made = config()
        made.architectures = [architecture]
        made.save_pretrained(folder / name)


@dataclass(frozen=True)
class Refused:
    """A start that is refused. ``{files}`` stands for the folder of :func:`write_files`."""

    words: tuple[str, ...] = ()
    """All of them are in the line; where there are none, it names one of the flags."""
    argv: tuple[str, ...] = ()
    """Behind ``--kv-cache-dtype int2``."""
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    model: str | None = None
    """Its folder; None for a model that is fine."""

    def said(self, line: str, files: Path) -> bool:
        """Whether the line says what it must."""
        if self.words:
            return all(word.format(files=files) in line for word in self.words)
        return any(word in line for word in self.argv if word.startswith("--"))


def _of_variable(name: str, value: str) -> Refused:
    """Where the value is at fault, the line says it."""
    at_fault = name not in (K, V, "DUMP_KVCACHE") and name in VALUED
    return Refused((name, value) if at_fault else (name,), env={name: value})


VALUED = {name for name, _ in VARIABLES} - {"SGLANG_OSCAR_K_ROTATION", "SGLANG_MIXED_KV_SINK_TOKENS"}
"""Variables that there are; the others are mistakes for them."""


def _table() -> dict[str, Refused]:
    flags = FLAGS + [line for name, line in RECENT_FLAGS.items() if name in FIELDS]
    table = {line: Refused(argv=tuple(line.split())) for line in flags}
    table |= {f"{name}={value}": _of_variable(name, value) for name, value in VARIABLES}
    table |= {f"{name} unset": Refused((name, "hadamard", "identity"), unset=(name,)) for name in (K, V)}
    for case, (name, file) in BROKEN_FILES.items():
        path = f"{{files}}/{file}".rstrip("/")
        table[f"{case} file"] = Refused((name, path), env={name: path})
    for name, (_, _, what) in MODEL_CASES.items():
        table[f"{name} model"] = Refused((what, "--kv-cache-dtype auto"), model=f"{{files}}/{name}")
    # Without speculation SGLang has no use for it.
    stream = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
    table[stream] = Refused((stream,), ("--speculative-algorithm", "NGRAM"), {stream: "1"})
    # Tables of rings and sinks would be those of the step that was recorded; older releases cannot do it.
    recorded = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    if hasattr(envs, recorded):
        table[recorded] = Refused((recorded,), env={recorded: "1"})
    reserves = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
    table[reserves] = Refused((f"{reserves}=0",), env={reserves: "1"})
    return table


REFUSED = _table()
