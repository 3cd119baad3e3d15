"""A small hybrid model: Qwen3-Next's architecture, as transformers has it, of layers with a linear state and a few that
attend to everything.

Training needs transformers alone: it computes the gated delta rule in plain torch where no kernels are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from reference_model.export import save_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "full_attention_interval": 3,  # the same once more, for servers that read this
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    # Every token goes to all experts, so that a rounded router chooses no others.
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True,
}


def config_of(vocab: int, positions: int) -> Qwen3NextConfig:
    """The configuration for a tokenizer of ``vocab`` entries and contexts of ``positions`` tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    return Qwen3NextConfig(
        vocab_size=vocab,
        max_position_embeddings=positions,
        rope_parameters=rope,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        **SHAPE,
    )


class HybridModel(nn.Module):
    """The model with random weights in float32, and logits for an answer.

    Args:
        vocab: entries of the tokenizer.
        positions: tokens of the longest context.
    """

    def __init__(self, vocab: int, positions: int) -> None:
        super().__init__()
        config = config_of(vocab, positions)
        # Grouped products of experts want weights in 16 bits.
        config._experts_implementation = "eager"
        self.model = Qwen3NextForCausalLM(config).float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, n] -> logits [batch, n, vocab]."""
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits

    def save(self, out: Path, tokenizer: Tokenizer) -> None:
        """Write a Hugging Face folder in BF16; the model itself stays as it is."""
        out.mkdir(parents=True, exist_ok=True)
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        self.model.save_pretrained(out, state_dict=rounded)
        # transformers writes the model's own dtype, of which servers make one that conv states do not have.
        config = json.loads((out / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(out, tokenizer, self.model.config.max_position_embeddings)
