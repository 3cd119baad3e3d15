"""Model folders of random weights in the shapes of real models: a config without weights, and a tokenizer.

A shape is named like its model; ``NAME:LAYERS`` is the model with fewer layers, where a card has no room for all.
Figures are those of the public configs on the Hugging Face Hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151645, "bos_token_id": 151643,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "partial_rotary_factor": 0.25, "head_dim": 256,
    "rope_theta": 1e7, "max_position_embeddings": 262144,
}  # fmt: skip
"""Every fourth layer attends; the others are gated DeltaNet."""
QWEN3_NEXT = QWEN3 | LINEAR | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
QWEN3_5 = QWEN3 | LINEAR | {
    "vocab_size": 248320, "attn_output_gate": True, "eos_token_id": 248044, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
QWEN3_6_35B = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_6_27B = QWEN3_5 | {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "attention_bias": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
    "hidden_act": "silu", "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 200002, "pad_token_id": 199999,
}  # fmt: skip
GLM_4_7 = QWEN3 | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "intermediate_size": 12288, "num_hidden_layers": 92, "num_attention_heads": 96, "attention_bias": True,
    "use_qk_norm": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752,
    "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "eos_token_id": 151329, "bos_token_id": None,
}  # fmt: skip
MINIMAX_M2_7 = QWEN3 | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "rotary_dim": 64,
    "rope_theta": 5e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 196608, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
    "eos_token_id": 200020, "bos_token_id": 200019,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": QWEN3 | {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
                         "num_attention_heads": 32},
    "qwen3-8b": QWEN3 | {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
                         "num_attention_heads": 32},
    "qwen3-32b": QWEN3 | {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600,
                          "num_attention_heads": 64},
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "qwen3.6-35b-a3b": QWEN3_6_35B,
    "qwen3.6-27b": QWEN3_6_27B,
    "gpt-oss-20b": GPT_OSS,
    "glm-4.7": GLM_4_7,
    "minimax-m2.7": MINIMAX_M2_7,
}  # fmt: skip
ENTRY = {"qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration", "qwen3_5_text": "Qwen3_5ForConditionalGeneration"}
"""Classes of models with images around the text model, by the type of that."""
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "in_channels": 3,
}  # fmt: skip
"""A tower of few layers: images are not asked for."""


def config_of(shape: str) -> dict[str, Any]:
    """The config of a text model by the name of its shape, ``NAME`` or ``NAME:LAYERS``.

    Raises:
        ValueError: there is no such shape, or not so many layers in whole periods.
    """
    name, _, layers = shape.partition(":")
    if name not in SHAPES:
        raise ValueError(f"no shape {name}; there are {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if layers:
        period = config.get("full_attention_interval", 2 if "sliding_window" in config else 1)
        if not 0 < int(layers) <= config["num_hidden_layers"] or int(layers) % period:
            raise ValueError(f"{name} has {config['num_hidden_layers']} layers, in periods of {period}")
        config["num_hidden_layers"] = int(layers)
    if "full_attention_interval" in config:
        kinds = ["linear_attention"] * (config["full_attention_interval"] - 1) + ["full_attention"]
        config["layer_types"] = kinds * (config["num_hidden_layers"] // len(kinds))
    elif "sliding_window" in config:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    return config


def attending_layers(shape: str, windows: bool) -> int:
    """Layers of a shape that attend to everything, and with ``windows`` those that see a window; others are linear.

    Raises:
        ValueError: as in :func:`config_of`.
    """
    kinds = layer_types(config_of(shape))
    return kinds.count("full_attention") + windows * kinds.count("sliding_attention")


def layer_types(config: dict[str, Any]) -> list[str]:
    """What each layer of a text model attends to."""
    return list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])


def has_images(config: dict[str, Any]) -> bool:
    """Whether a text model is within one of images, which needs its processor."""
    return config["model_type"] in ENTRY


def write_model(folder: Path, shape: str, tokenizer: bool = False) -> None:
    """A model folder that a server with random weights loads: a config, and a processor where images need one.

    Args:
        folder: to write to.
        shape: as in :func:`config_of`.
        tokenizer: whether the model gets a tokenizer, too; one of images always does.

    Raises:
        ValueError: as in :func:`config_of`.
    """
    config = config_of(shape)
    if tokenizer or has_images(config):
        write_tokenizer(folder, config)
    if has_images(config):
        write_processor(folder)
        last = config["vocab_size"] - 1
        config = {
            "architectures": [ENTRY[config["model_type"]]],
            "model_type": config["model_type"].removesuffix("_text"),
            "text_config": config,
            "vision_config": VISION | {"out_hidden_size": config["hidden_size"]},
            "torch_dtype": "bfloat16",
            "image_token_id": last - 3,
            "video_token_id": last - 2,
            "vision_start_token_id": last - 1,
            "vision_end_token_id": last,
        }
    (folder / "config.json").write_text(json.dumps(config))


def write_draft_model(folder: Path, shape: str) -> None:
    """The same for a draft layer of EAGLE3, which drafts from 32,000 of the model's tokens, as trained ones do."""
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config_of(shape) | own | {"draft_vocab_size": 32000}))


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """A tokenizer beside a model: every id of its vocabulary is a word, so that every answer is text."""
    words = {f"w{n}": n for n in range(int(config["vocab_size"]))}
    for number, name in enumerate(("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")):
        words[name] = words.pop(f"w{config['vocab_size'] - 4 + number}")
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{config['eos_token_id']}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_processor(folder: Path) -> None:
    """What a model of images makes of them, beside its tokenizer."""
    # Seconds to import, which models without images do not need.
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    images = Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 1 << 10, "longest_edge": 1 << 20})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(patch_size=16)).save_pretrained(folder)
