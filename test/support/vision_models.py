"""Small random models that read images, with tokenizer and processor, as Hugging Face checkpoints; and images."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel

from support.models import COMMON
from support.releases import tree  # noqa: F401 - finds scripts

from model_classes import seeing  # isort: skip
from model_classes.seeing import tokenizer  # isort: skip

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""How a prompt of Qwen's says where an image is."""
Prompt = tuple[str, list[str]]
"""Text of a prompt and its images."""
TEXT = {name: COMMON[name] for name in ("num_hidden_layers", "max_position_embeddings", "initializer_range")}
VISION: dict[str, Any] = seeing.TOWER | {"out_hidden_size": COMMON["hidden_size"], "initializer_range": 0.1}
TOKENS: dict[str, Any] = seeing.QWEN_IDS | {
    "tie_word_embeddings": False,
    "initializer_range": TEXT["initializer_range"],
}
CLASSES = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def build(architecture: str) -> PreTrainedModel:
    """A random model in BF16, one of ``CLASSES``."""
    torch.manual_seed(7)
    config = seeing.configuration(CLASSES[architecture], **TEXT)
    config.initializer_range, config.vision_config.initializer_range = TEXT["initializer_range"], 0.1
    model: PreTrainedModel = getattr(transformers, CLASSES[architecture])(config)
    strengthen_images(model)
    return model.to(torch.bfloat16)


def strengthen_images(model: PreTrainedModel) -> None:
    """Let answers depend on what is seen."""
    for name, parameter in model.named_parameters():
        last = ("linear_fc2.weight", "mlp.2.weight", "projector.linear_2.weight")
        if ("merger" in name or "projector" in name) and name.endswith(last):
            torch.nn.init.normal_(parameter, std=0.5)


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
    stated = json.loads((folder / "config.json").read_text())
    del stated["vision_config"]["rope_parameters"]  # published configurations state none, and other releases another
    (folder / "config.json").write_text(json.dumps(stated))
    save_processor(architecture, folder)
    return folder


def save_processor(architecture: str, folder: Path) -> None:
    """Write the processor and tokenizer of a random model to ``folder``."""
    seeing.processor(architecture).save_pretrained(folder)


def image(seed: int, width: int, height: int) -> str:
    """A PNG of random pixels as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
