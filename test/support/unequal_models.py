"""A small random MiMo-V2-Flash: heads of 192 channels for keys and 128 for values, and layers with a window that have
other query heads and sink logits.

Weights have the names of published checkpoints, not those of transformers' model of the class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from support.models import COMMON

KEY_DIM, VALUE_DIM, EXPERTS, MIDDLE, ROPE = 192, 128, 2, 64, 5000000.0
KV_HEADS = COMMON["num_key_value_heads"]
LAYERS = 4
FULL = (1, 3)
"""Layers that attend to all tokens."""
HEADS = {"full": COMMON["num_attention_heads"], "window": 6}
OWN: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "head_dim": KEY_DIM, "v_head_dim": VALUE_DIM, "swa_head_dim": KEY_DIM, "swa_v_head_dim": VALUE_DIM,
    "swa_num_attention_heads": HEADS["window"], "swa_num_key_value_heads": KV_HEADS,
    "hybrid_layer_pattern": [int(layer not in FULL) for layer in range(LAYERS)],
    "sliding_window": 96, "sliding_window_size": 96,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_value_scale": 0.707,
    "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "rope_theta": ROPE, "swa_rope_theta": 10000.0,
    "moe_layer_freq": [0, 1, 0, 0], "n_routed_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": MIDDLE, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": None, "routed_scaling_factor": None,
}  # fmt: skip
"""Every token goes to all experts: noise in the last bit of a router would choose others."""


def weights() -> dict[str, torch.Tensor]:
    """By their names in a checkpoint, bfloat16 but for a router's."""
    generator = torch.Generator().manual_seed(7)
    hidden, wide = COMMON["hidden_size"], COMMON["intermediate_size"]

    def drawn(*shape: int, std: float = 0.08, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).bfloat16()

    def mlp(size: int) -> dict[str, torch.Tensor]:
        return {"gate_proj": drawn(size, hidden), "up_proj": drawn(size, hidden), "down_proj": drawn(hidden, size)}

    found = {"model.embed_tokens.weight": drawn(COMMON["vocab_size"], hidden, std=1.0)}
    found |= {"model.norm.weight": torch.ones(hidden).bfloat16(), "lm_head.weight": drawn(COMMON["vocab_size"], hidden)}
    for layer in range(LAYERS):
        at, kind = f"model.layers.{layer}", "full" if layer in FULL else "window"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = torch.ones(hidden).bfloat16()
        sizes = {
            "q_proj": (HEADS[kind] * KEY_DIM, hidden), "k_proj": (KV_HEADS * KEY_DIM, hidden),
            "v_proj": (KV_HEADS * VALUE_DIM, hidden), "o_proj": (hidden, HEADS[kind] * VALUE_DIM),
        }  # fmt: skip
        found |= {f"{at}.self_attn.{name}.weight": drawn(*size) for name, size in sizes.items()}
        if kind == "window":  # as strong as the logits of some ten tokens: dropping them must show
            found[f"{at}.self_attn.attention_sink_bias"] = drawn(HEADS[kind], mean=2.0)
        if not OWN["moe_layer_freq"][layer]:
            found |= {f"{at}.mlp.{name}.weight": x for name, x in mlp(wide).items()}
            continue
        found[f"{at}.mlp.gate.weight"] = drawn(EXPERTS, hidden).float()
        found[f"{at}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        for expert in range(EXPERTS):
            found |= {f"{at}.mlp.experts.{expert}.{name}.weight": x for name, x in mlp(MIDDLE).items()}
    return found


def save(folder: Path) -> Path:
    """Write the model to ``folder`` and return it."""
    config = AutoConfig.for_model("llama", **COMMON | OWN, torch_dtype="bfloat16")
    config.architectures = ["MiMoV2FlashForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(weights(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
