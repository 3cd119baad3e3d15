"""A small configuration, tokenizer and processor of every class of models that see images and is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model_classes.shapes import COMMON, HEADS, MOE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
SPECIAL += ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>"]
SPECIAL += ["<|end_of_video|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "<IMG_CONTEXT>", "</img>"]
"""Tokens by which processors of any of these models know images."""
ID = {token: 256 + index for index, token in enumerate(SPECIAL)}
TEXT: dict[str, Any] = {name: value for name, value in COMMON.items() if name != "tie_word_embeddings"}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
INTERLEAVED = MROPE | {"mrope_interleaved": True}
HALF: dict[str, Any] = MROPE | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": ID["<|image_pad|>"],
    "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
}
GLM_IDS: dict[str, Any] = {
    f"{kind}{place}_token_id": ID[f"<|{of}{kind}|>"]
    for kind in ("image", "video")
    for place, of in (("", ""), ("_start", "begin_of_"), ("_end", "end_of_"))
}
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
QWEN3_TOWER = TOWER | {"out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
GLM_TOWER = TOWER | {"out_hidden_size": 256, "image_size": 56}
SHARED = MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1}
LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
INTERN: dict[str, Any] = {
    "model_type": "internvl_chat",
    "vision_config": LAYERS | {"image_size": 448, "patch_size": 56, "norm_type": "rms_norm"},
    "llm_config": COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "force_image_size": 448,
    "ps_version": "v2",
    "auto_map": {"AutoConfig": "own_configuration.InternVLChatConfig"},
}

SHAPES: dict[str, dict[str, Any]] = {
    "Glm4vForConditionalGeneration": {
        "model_type": "glm4v",
        "text_config": TEXT | HEADS | {"rope_parameters": HALF},
        "vision_config": GLM_TOWER,
    } | GLM_IDS,
    "Glm4vMoeForConditionalGeneration": {
        "model_type": "glm4v_moe",
        "text_config": TEXT | HEADS | SHARED | {"rope_parameters": HALF},
        "vision_config": GLM_TOWER,
    } | GLM_IDS,
    "InternVLChatModel": INTERN,
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": LAYERS | {"model_type": "pixtral", "image_size": 336, "patch_size": 14},
        "image_token_index": ID["[IMG]"],
        "spatial_merge_size": 2,
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "text_config": TEXT | HEADS | {"rope_parameters": MROPE},
        "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 256, "in_chans": 3},
    } | QWEN_IDS,
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": TEXT | HEADS | {"rope_parameters": MROPE},
        "vision_config": TOWER | {"out_hidden_size": 256, "fullatt_block_indexes": [1], "window_size": 56},
    } | QWEN_IDS,
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": TEXT | {"rope_parameters": INTERLEAVED},
        "vision_config": QWEN3_TOWER,
    } | QWEN_IDS,
    "Qwen3VLMoeForConditionalGeneration": {
        "model_type": "qwen3_vl_moe",
        "text_config": TEXT | MOE | {"rope_parameters": INTERLEAVED},
        "vision_config": QWEN3_TOWER,
    } | QWEN_IDS,
}  # fmt: skip
"""By class, what a configuration has besides defaults."""


def tokenizer() -> Any:
    """A token for every byte, and ``SPECIAL``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(SPECIAL)
    return transformers.Qwen2TokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def processor(model_type: str) -> Any:
    """What reads a prompt and its images for a type of model."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    size = {"shortest_edge": 28 * 28, "longest_edge": 1 << 20}
    if model_type == "internvl_chat":
        return tokenizer()
    if model_type == "mistral3":
        images = transformers.PixtralImageProcessor(patch_size=14, size={"longest_edge": 336})
        return transformers.PixtralProcessor(images, tokenizer(), 14, 2, template)
    if model_type.startswith("glm4v"):
        images = transformers.Glm4vImageProcessor(size=size)
        return transformers.Glm4vProcessor(images, tokenizer(), transformers.Glm4vVideoProcessor(), template)
    if model_type.startswith("qwen3_vl"):
        images = transformers.Qwen2VLImageProcessor(patch_size=16, size=size)
        return transformers.Qwen3VLProcessor(
            images, tokenizer(), transformers.Qwen3VLVideoProcessor(patch_size=16), template
        )
    images, videos = transformers.Qwen2VLImageProcessor(size=size), transformers.Qwen2VLVideoProcessor()
    of = transformers.Qwen2_5_VLProcessor if model_type == "qwen2_5_vl" else transformers.Qwen2VLProcessor
    return of(images, tokenizer(), videos, template)


def configuration(name: str, **text: Any) -> Any:
    """The configuration of a class that transformers knows.

    Args:
        name: in ``SHAPES``.
        text: fields of its text model.
    """
    own = {field: value for field, value in SHAPES[name].items() if field != "model_type"}
    own["text_config"] = own["text_config"] | text
    return transformers.AutoConfig.for_model(SHAPES[name]["model_type"], tie_word_embeddings=False, **own)


def save(name: str, folder: Path) -> Path:
    """Write the configuration and the processor of a class to ``folder`` and return it."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    processor(shape["model_type"]).save_pretrained(folder)
    if "auto_map" in shape:
        (folder / "own_configuration.py").write_text("from sglang.srt.configs.internvl import InternVLChatConfig\n")
        transformers.CLIPImageProcessor().save_pretrained(folder)  # SGLang looks for one, and does not use it
    facts = shape if "auto_map" in shape else configuration(name).to_dict()
    facts |= {"architectures": [name], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(facts, default=str))
    return folder
