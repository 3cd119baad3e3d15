"""Small random models that read images, with tokenizer and processor, as Hugging Face checkpoints; and images."""

from __future__ import annotations

import base64
import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from support.models import COMMON

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
ID = {token: 256 + index for index, token in enumerate(SPECIAL)}
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""How a prompt says where an image is."""
Prompt = tuple[str, list[str]]
"""Text of a prompt and its images."""
TEXT: dict[str, Any] = {name: value for name, value in COMMON.items() if name != "tie_word_embeddings"}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
VISION |= {"out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.1}
TOKENS: dict[str, Any] = {
    "image_token_id": ID["<|image_pad|>"],
    "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
    "tie_word_embeddings": False,
    "initializer_range": TEXT["initializer_range"],
}
PATCH = {"qwen3_vl": 16, "qwen2_5_vl": 14}
"""Pixels of a patch; four of them make a token."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}


def build(architecture: str) -> PreTrainedModel:
    """A random model in BF16: ``qwen3_vl`` or ``qwen2_5_vl``."""
    torch.manual_seed(7)
    options = TEXT | {"rope_parameters": ROPE}
    if architecture == "qwen3_vl":
        vision = VISION | {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        model: PreTrainedModel = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config=options | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
                vision_config=vision,
                **TOKENS,
            )
        )
    else:
        options |= {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }  # its head_dim is what hidden_size leaves a head
        vision = VISION | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=options, vision_config=vision, **TOKENS)
        )
    strengthen_images(model)
    return model.to(torch.bfloat16)


def strengthen_images(model: PreTrainedModel) -> None:
    """Let answers depend on what is seen."""
    for name, parameter in model.named_parameters():
        if "merger" in name and name.endswith(("linear_fc2.weight", "mlp.2.weight")):
            torch.nn.init.normal_(parameter, std=0.5)


@cache
def tokenizer() -> Qwen2TokenizerFast:
    """A token for every byte, and those that Qwen's processors look for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(SPECIAL)
    return Qwen2TokenizerFast(tokenizer_object=bytes_only, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def letters(count: int, seed: int) -> str:
    """Text of as many tokens."""
    return "".join(random.Random(seed).choices(LETTERS, k=count))


def ask(server: Any, prompt: Prompt, tokens: int, **extra: Any) -> dict[str, Any]:
    """What a server, or a pair of them, answers to a prompt."""
    text, images = prompt
    seen = {"image_data": images} if images else {}
    answer: dict[str, Any] = server.generate(tokenizer()(text)["input_ids"], tokens, **seen, **extra)
    return answer


def letter_ids() -> list[int]:
    """Tokens of small letters, space and punctuation: text that is the same once it was decoded."""
    return tokenizer()(LETTERS)["input_ids"]


def save(architecture: str, folder: Path) -> Path:
    """Write a random model with its processor to ``folder`` and return it."""
    build(architecture).save_pretrained(folder)
    save_processor(architecture, folder)
    return folder


def save_processor(architecture: str, folder: Path) -> None:
    """Write the processor and tokenizer of a random model to ``folder``."""
    images = Qwen2VLImageProcessor(
        patch_size=PATCH[architecture], size={"shortest_edge": 28 * 28, "longest_edge": 1 << 20}
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if architecture == "qwen3_vl":
        processor: Any = Qwen3VLProcessor(images, tokenizer(), Qwen3VLVideoProcessor(patch_size=16), template)
    else:
        processor = Qwen2_5_VLProcessor(images, tokenizer(), Qwen2VLVideoProcessor(patch_size=14), template)
    processor.save_pretrained(folder)


def image(seed: int, width: int, height: int) -> str:
    """A PNG of random pixels as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
