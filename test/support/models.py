"""Small random models of the architectures that int2 mode serves, as Hugging Face checkpoints.

Weights are drawn wide enough that greedy continuations wander instead of repeating one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "eos_token_id": None,
    "bos_token_id": None,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def build(architecture: str, **overrides: Any) -> PreTrainedModel:
    """A random model in BF16: ``qwen3``, ``llama``, ``qwen3_moe``, ``glm4_moe`` or ``gpt_oss``."""
    torch.manual_seed(7)
    options = COMMON | overrides
    if architecture == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**options))
    elif architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**options))
    elif architecture == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | options, num_experts=4, norm_topk_prob=True))
    elif architecture == "glm4_moe":
        extra = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**MOE | extra | options, use_qk_norm=True))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # Biases start at zero; a wrong rotation of them must show.
                torch.nn.init.normal_(parameter, std=0.2)
    elif architecture == "gpt_oss":
        layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        # Every token goes to all experts: noise in the last bit of a router would choose others.
        experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 128}
        # Published checkpoints state the limit, and SGLang reads it; not every transformers has a default for it.
        own = {"sliding_window": 96, "swiglu_limit": 7.0, "rope_parameters": ROPE}
        model = GptOssForCausalLM(GptOssConfig(**COMMON | layers | experts | own | overrides))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # As strong as the logits of some ten tokens: dropping them must show.
                torch.nn.init.normal_(parameter, mean=2.0)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.02)
            elif "embed_tokens" in name:
                torch.nn.init.normal_(parameter)
    else:
        raise ValueError(f"unknown architecture {architecture}")
    return model.to(torch.bfloat16)


def save(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Write a random model to ``folder`` and return it."""
    build(architecture, **overrides).save_pretrained(folder)
    return folder
