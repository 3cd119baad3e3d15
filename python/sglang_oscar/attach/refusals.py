"""What int2 mode cannot do, as a table: each row refuses at start-up with one line that says what to change."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import model_classes
from sglang_oscar.attach.arguments import algorithm, disaggregated, drafts_with_model
from sglang_oscar.attach.feature import Refusal, features
from sglang_oscar.attach.releases import argument, drafts_token_ids, switched_on
from sglang_oscar.errors import Int2Error


def _graph_backend(args: Any, phase: str, unresolved: str | None) -> str | None:
    """The CUDA graph backend of a phase; before SGLang has resolved it, its settings are None or the text of a flag."""
    resolved = getattr(args.cuda_graph_config, phase, None)
    return resolved.backend if resolved else unresolved


def _compiles_nothing(args: Any) -> bool:
    """SGLang compiles a decode step where it captures one as a whole, and nowhere else."""
    off = args.disable_cuda_graph or args.disable_decode_cuda_graph
    backend = args.cuda_graph_backend_decode or ("disabled" if off else "full")
    return args.enable_torch_compile and _graph_backend(args, "decode", backend) != "full"


def _captures_whole_prefills(args: Any) -> bool:
    """A graph of a whole forward pass would keep the tables and the plan of the batch that it was captured with."""
    return _graph_backend(args, "prefill", args.cuda_graph_backend_prefill) == "full"


def _records_preparation(args: Any) -> bool:
    """What SGLang records of a step's preparation is replayed without its host part, which says where rings and sinks
    are."""
    return switched_on("SGLANG_ENABLE_METADATA_GLUE_GRAPH")


def _heads_first(args: Any) -> bool:
    """Pools with heads outside of tokens; rows of codes hold all heads of a token."""
    return switched_on("SGLANG_USE_HND_KVCACHE")


def _sizes_behind_capture(args: Any) -> bool:
    """A pool that is sized once graphs are captured reserves address space that rows of codes cannot use."""
    return switched_on("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")


def _context_parallel(args: Any) -> bool:
    """Flags of which later releases have only the first."""
    flags = ("enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel")
    return args.enable_prefill_cp or any(argument(args, flag, False) for flag in flags)


ARGUMENTS: list[Refusal] = [
    (lambda a: a.dcp_size > 1, "decode context parallelism; set --dcp-size 1"),
    (lambda a: a.attn_cp_size > 1, "context parallelism; set --attn-cp-size 1"),
    (_context_parallel, "context parallelism; drop --enable-prefill-cp"),
    (
        lambda a: a.enable_streaming_session,
        "streaming sessions, which keep rows of the recent ring from turn to turn; drop --enable-streaming-session",
    ),
    (
        lambda a: a.enable_lmcache,
        "LMCache, whose keys do not say which rotation rows have; drop --enable-lmcache, "
        "or use --enable-hierarchical-cache",
    ),
    (
        lambda a: a.enable_flexkv or a.flexkv_config_file is not None,
        "FlexKV, whose keys do not say which rotation rows have; drop --enable-flexkv and --flexkv-config-file, "
        "or use --enable-hierarchical-cache",
    ),
    (
        lambda a: argument(a, "enable_unified_cache_external_linker", False),
        "prefix caches in other stores; drop --enable-unified-cache-external-linker",
    ),
    (lambda a: a.radix_cache_backend is not None, "other prefix caches; drop --radix-cache-backend"),
    (lambda a: a.enable_hisparse, "HiSparse; drop --enable-hisparse"),
    (lambda a: a.enable_page_major_kv_layout, "page-major pools; drop --enable-page-major-kv-layout"),
    (_heads_first, "pools by heads; unset SGLANG_USE_HND_KVCACHE"),
    (_sizes_behind_capture, "pools that are sized behind graphs; set SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0"),
    (lambda a: a.enable_unified_memory, "unified memory pools; drop --enable-unified-memory"),
    (lambda a: a.enable_pdmux, "PD multiplexing; drop --enable-pdmux"),
    (lambda a: a.enable_two_batch_overlap, "two-batch overlap; drop --enable-two-batch-overlap"),
    (lambda a: a.dllm_algorithm is not None, "diffusion language models; drop --dllm-algorithm"),
    (
        lambda a: a.enable_memory_saver and (a.device == "cpu" or a.enable_hierarchical_cache or disaggregated(a)),
        "the memory saver on a CPU, with hierarchical caching or disaggregation; drop --enable-memory-saver",
    ),
    (_compiles_nothing, "torch.compile without full CUDA graphs of decode steps; drop --enable-torch-compile"),
    (lambda a: a.enable_torch_compile and a.device == "cpu", "torch.compile on a CPU; drop --enable-torch-compile"),
    (_records_preparation, "steps whose preparation is recorded; unset SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
    (_captures_whole_prefills, "full CUDA graphs of prefills; drop --cuda-graph-backend-prefill full"),
    (
        lambda a: argument(a, "enable_nvidia_megakernel", False),
        "megakernels, which bring their own attention; drop --enable-nvidia-megakernel",
    ),
    (lambda a: a.model_impl == "transformers", "models of transformers; drop --model-impl transformers"),
    (lambda a: a.use_ray, "Ray (its workers load no plugins); drop --use-ray"),
    (lambda a: a.elastic_ep_backend not in (None, "none"), "elastic experts; drop --elastic-ep-backend"),
    (lambda a: a.enable_elastic_expert_backup, "elastic experts; drop --enable-elastic-expert-backup"),
    (lambda a: a.kv_canary != "none", "the KV canary; drop --kv-canary"),
    (lambda a: a.prefill_only_disable_kv_cache, "prefill-only mode; drop --prefill-only-disable-kv-cache"),
    (lambda a: a.encoder_only, "encoder-only serving; drop --encoder-only"),
    (lambda a: a.language_only, "encoders in other processes; drop --language-only"),
    (
        lambda a: a.enable_adaptive_dispatch_to_encoder,
        "encoders in other processes; drop --enable-adaptive-dispatch-to-encoder",
    ),
    (lambda a: a.enable_mis, "multi-item scoring; drop --enable-mis"),
    (lambda a: a.enable_deterministic_inference, "deterministic inference; drop --enable-deterministic-inference"),
    (lambda a: a.rl_on_policy_target is not None, "on-policy RL mode; drop --rl-on-policy-target"),
]

VISION_MODELS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Glm4v", "Glm4vMoe", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")
) | {"InternVLChatModel"}
"""Multimodal models that are served. What they see becomes embeddings of tokens, and a text model attends to all tokens
causally with grouped queries, in every layer; the attention of the vision tower keeps nothing in the cache."""

BOTH_WAYS = frozenset(f"{name}ForConditionalGeneration" for name in ("Gemma3", "Gemma4", "Gemma4Unified"))
"""Models whose text layers let tokens of an image attend to each other in both directions. SGLang leaves that mask with
its Triton backend; another would ignore it and answer fluently."""

VISION: list[Refusal] = [
    (lambda a: a.enable_torch_compile, "with torch.compile; drop --enable-torch-compile"),
    (
        lambda a: not (algorithm(a) is None or drafts_with_model(a) or drafts_token_ids()),
        "with drafts of NGRAM before SGLang 0.5.23; drop --speculative-algorithm, or set it to another",
    ),
]
"""Arguments that are refused with a multimodal model only."""

UNEQUAL: list[Refusal] = [
    (
        # SGLang sends rings and windows through it in steps of the first half's sizes, which are those of keys.
        lambda a: disaggregated(a) and a.disaggregation_transfer_backend == "nixl",
        "over nixl; set --disaggregation-transfer-backend mooncake",
    ),
]
"""Arguments that are refused with a model only whose heads of keys and values differ in size."""


def _block_sparse(model: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    minicpm = getattr(model.hf_config, "has_minicpm_sparse_attention", False)
    return bool(minicpm or is_minimax_sparse(model.hf_config))


def _other_multimodal(model: Any) -> bool:
    served = VISION_MODELS.union(*(feature.architectures for feature in features()))
    return model.is_multimodal and served.isdisjoint(model.hf_config.architectures)


HEADS = {(64, 64), (128, 128), (256, 256), (192, 128)}
"""Channels of a head of keys and of values that were tried."""

MODELS: list[Refusal] = [
    (lambda m: m.attention_arch.name != "MHA", "multi-head latent attention (MLA) models"),
    (lambda m: getattr(m.hf_config, "dual_chunk_attention_config", None) is not None, "dual-chunk attention models"),
    (_block_sparse, "block-sparse attention models"),
    (lambda m: not BOTH_WAYS.isdisjoint(m.hf_config.architectures), "attention in both directions within images"),
    (_other_multimodal, "multimodal models other than GLM-4V, InternVL, Mistral-3, Qwen-VL and Qwen3.5/3.6"),
    (lambda m: m.is_encoder_decoder, "encoder-decoder models"),
    (lambda m: not m.is_generation, "embedding, reward and other non-generating models"),
    (
        lambda m: (m.head_dim, m.v_head_dim) not in HEADS,
        "a head_dim other than 64, 128 or 256, or 192 of keys and 128 of values",
    ),
]


CLASSES = (
    "classes that [this table](../python/sglang_oscar/attach/model_classes.csv) does not have as served; those that "
    f"were not tried serve with {model_classes.ALLOW}=1 (`oscar try-class` tries one)"
)
"""What the reference says of :mod:`sglang_oscar.attach.model_classes`."""


ATTENTION: list[Refusal] = [
    (lambda layer: layer.logit_cap != 0, "logit soft-capping"),
    (lambda layer: layer.sliding_window_size not in (-1, None), "sliding-window attention"),
    (lambda layer: layer.is_cross_attention, "cross attention"),
    (lambda layer: layer.attn_type.name != "DECODER", "bidirectional attention"),
    (lambda layer: layer.xai_temperature_len > 0, "attention temperature"),
    (lambda layer: layer.use_irope, "interleaved RoPE (iRoPE) chunked attention"),
]
"""Features of an attention layer that the kernels lack."""


def arguments() -> list[Refusal]:
    """Refused server arguments of all rooms and of the core, in the order in which they are asked."""
    return [*(row for feature in features() for row in feature.refused), *ARGUMENTS]


def rows() -> dict[str, list[str]]:
    """What is refused with what, for docs/reference.md: lines ``feature; what to change``, without the latter where it
    is ``--kv-cache-dtype auto``."""
    found = {"Any model": [what for _, what in arguments()]}
    for feature in features():
        found |= {title: [what for _, what in table] for title, table in feature.refused_with}
    found["Models that see images"] = [what for _, what in VISION]
    found["Heads of two sizes"] = [what for _, what in UNEQUAL]
    models = [what for _, what in [*MODELS, *ATTENTION]] + [CLASSES]
    return found | {"Models": models + [line for feature in features() for line in feature.refused_models]}


def check_arguments(server_args: Any) -> None:
    """Refuse server arguments that int2 mode does not support.

    Raises:
        Int2Error: naming the feature and the flag to drop.
    """
    for refused, what in arguments():
        if refused(server_args):
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what}")


def check_model(model_config: Any, server_args: Any = None) -> None:
    """Refuse model architectures that int2 mode does not support.

    Args:
        model_config: SGLang's ModelConfig.
        server_args: also refuse those of these arguments that do not go with the model; None where there are none yet.

    Raises:
        Int2Error: naming the model and the feature.
    """
    name = f"{model_config.model_path} ({', '.join(model_config.hf_config.architectures)})"
    for refused, what in MODELS:
        if refused(model_config):
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what}: {name}; use --kv-cache-dtype auto")
    for feature in features():
        feature.check_model(model_config, server_args)
    for refused, what in VISION:
        if server_args is not None and model_config.is_multimodal and refused(server_args):
            raise Int2Error(f"--kv-cache-dtype int2 does not support multimodal models {what}: {name}")
    for refused, what in UNEQUAL:
        if server_args is not None and model_config.head_dim != model_config.v_head_dim and refused(server_args):
            raise Int2Error(
                f"--kv-cache-dtype int2 does not support heads of keys and values that differ in size {what}: {name}"
            )
    model_classes.check(model_config.hf_config.architectures, name)


def check_attention_layer(layer: Any) -> None:
    """Refuse attention layers with features that the kernels lack.

    Args:
        layer: a RadixAttention module.

    Raises:
        Int2Error: naming the layer and the feature.
    """
    for present, what in ATTENTION:
        if present(layer):
            raise Int2Error(
                f"--kv-cache-dtype int2 does not support {what} (layer {layer.layer_id}); use --kv-cache-dtype auto"
            )
