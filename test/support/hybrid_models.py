"""Small random models of linear and full attention layers, as Hugging Face checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from support.models import COMMON
from support.vision_models import TOKENS, VISION, letter_ids, save_processor, strengthen_images

LAZY = ["--mamba-radix-cache-strategy", "extra_buffer_lazy"]
"""A request has a second slot for states only where a page may end in a step."""
FULL_LAYERS = (1, 3)
"""Layers with full attention; the others are linear."""
SEEING = ("qwen3_5", "qwen3_5_moe")
"""Models of text and images."""
LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,  # all are asked: rounding must not choose between them
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}


QWEN3_6: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "rope_parameters": ROPE | {"rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    "mtp_num_hidden_layers": 1,
}
"""Layers and heads as in the published configuration of Qwen3.6-35B-A3B, but for sizes that cost time."""


MAMBA2: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
    "n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "chunk_size": 128,
}
PUBLISHED: dict[str, Any] = {"hybrid_override_pattern": "M*-M*", "mamba_n_groups": 2}
"""As published configurations say it, and SGLang reads it; transformers writes other names."""


def build(architecture: str, **overrides: Any) -> PreTrainedModel:
    """A random model in BF16: ``qwen3_next``, of text alone ``qwen3_5_text`` or ``qwen3_5_moe_text``, of Mamba2
    ``nemotron_h``; of text and images, as published, ``qwen3_5`` or ``qwen3_5_moe``, whose answers are letters."""
    torch.manual_seed(7)
    options = COMMON | LAYERS | LINEAR | overrides
    vision = VISION | {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
    rope = ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    if architecture == "qwen3_next":
        options = EXPERTS | options
        model: PreTrainedModel = Qwen3NextForCausalLM(Qwen3NextConfig(**options, rope_parameters=ROPE))
    elif architecture == "nemotron_h":
        own = {name: value for name, value in (COMMON | MAMBA2 | overrides).items() if name != "num_hidden_layers"}
        model = NemotronHForCausalLM(NemotronHConfig(**own))
    elif architecture == "qwen3_5_text":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options, rope_parameters=rope))
    elif architecture == "qwen3_5_moe_text":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**EXPERTS | options, rope_parameters=rope))
    else:
        experts = EXPERTS if architecture == "qwen3_5_moe" else {}
        text = {name: value for name, value in (experts | options).items() if name != "tie_word_embeddings"}
        parts = {"text_config": {"rope_parameters": rope} | text, "vision_config": vision}
        if experts:
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**parts, **TOKENS))
        else:
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**parts, **TOKENS))
        see_and_write_letters(model)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # so that states forget slowly, and what a wrong one holds shows
            torch.nn.init.uniform_(parameter, -3.0, 0.0)
        elif name.endswith(("norm.weight", "dt_bias")):
            torch.nn.init.normal_(parameter, mean=parameter.float().mean().item(), std=0.2)
    return model.to(torch.bfloat16)


def see_and_write_letters(model: PreTrainedModel) -> None:
    """Let answers depend on what is seen, and be text that a prompt can go on with."""
    strengthen_images(model)
    head = model.lm_head.weight.data
    letters = head[letter_ids()].clone()
    head.zero_()
    head[letter_ids()] = letters


def save(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Write a random model to ``folder`` and return it."""
    return write(build(architecture, **overrides), architecture, folder)


def write(model: PreTrainedModel, architecture: str, folder: Path) -> Path:
    """Write a model that :func:`build` made to ``folder`` and return it."""
    model.save_pretrained(folder)
    if architecture == "nemotron_h":
        stated = json.loads((folder / "config.json").read_text())
        del stated["layers_block_type"], stated["mtp_layers_block_type"]
        (folder / "config.json").write_text(json.dumps(stated | PUBLISHED))
    if architecture in SEEING:
        save_processor("qwen3_vl", folder)
    return folder
