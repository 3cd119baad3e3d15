"""Write and read the model as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from reference_model.corpus import END_OF_TEXT, SPECIALS
from reference_model.model import ModelConfig, ReferenceModel

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, the format of half of the retrieval samples."""


def save_model(out: Path, config: ModelConfig, state: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Write config.json, model.safetensors (BF16), tokenizer and generation config into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    save_tokenizer(out, tokenizer, config.max_positions)


def save_tokenizer(out: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    """Write tokenizer, chat template and generation config into a model folder."""
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    end_of_turn = SPECIALS.index("<|im_end|>")
    files = {
        "generation_config.json": {"do_sample": False, "eos_token_id": [END_OF_TEXT, end_of_turn], "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(SPECIALS),
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_state(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Config and BF16 state dict of a folder written by :func:`save_model`."""
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return config, load_file(str(folder / "model.safetensors"))


def build_model(
    config: ModelConfig, state: dict[str, torch.Tensor], device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> ReferenceModel:
    """The model with these weights, ready to evaluate."""
    model = ReferenceModel(config)
    model.load_state_dict(state)
    return model.to(device, dtype).eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
