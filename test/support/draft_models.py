"""Small draft models for the small models of tests: some that are right often, and one that hardly ever is.

A draft layer sees the embedding of the token that was last accepted and the model's hidden state before it. One that
ignores the hidden state and is a copy of the model's first layer computes what that layer does, one token late. It is
right as often as the model's other layers change nothing, and only while its own cache holds what it should.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models import COMMON, build

HIDDEN = COMMON["hidden_size"]
OTHER_LAYERS, ATTENTION = 0.2, 16.0
"""What is left of the outputs of all layers but the first, and how much stronger the attention of that one gets."""
READ = [0, 1]
"""Layers whose outputs EAGLE3's drafts are made of. Unless told SGLang takes three, counted from either end of the
model; in one of three layers that is also what goes into the first, which older releases cannot hand out."""


def first_layer_leads(model: Any) -> Any:
    """Let the first layer decide, its attention above all; bring embeddings to the length that a norm gives them."""
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(embedding.float() / embedding.float().pow(2).mean(-1, keepdim=True).sqrt())
        for name, parameter in model.model.layers[1:].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(OTHER_LAYERS)
        model.model.layers[0].self_attn.o_proj.weight.mul_(ATTENTION)
    return model


def first_layer(model: Any) -> dict[str, torch.Tensor]:
    """Weights of the first layer by their names in it."""
    return {name: parameter.detach().clone() for name, parameter in model.model.layers[0].named_parameters()}


def ignoring_the_hidden_state() -> torch.Tensor:
    """A projection of embedding and hidden state, side by side, that passes the embedding on."""
    return torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1).bfloat16()


def write(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Write a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def llama_with_drafts(folder: Path) -> tuple[Path, Path, Path]:
    """A Llama model, an EAGLE draft model that is right often, and an EAGLE3 draft model with random weights."""
    model = first_layer_leads(build("llama"))
    model.save_pretrained(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | {"num_hidden_layers": 1}
    weights = {f"layers.0.{name}": tensor for name, tensor in first_layer(model).items() if "input_layern" not in name}
    weights |= {"fc.weight": ignoring_the_hidden_state(), "fc.bias": torch.zeros(HIDDEN).bfloat16()}
    eagle = write(folder / "eagle", weights, config | {"architectures": ["LlamaForCausalLMEagle"]})
    layer = first_layer(model)
    for name in ("q_proj", "k_proj", "v_proj"):  # of an embedding and a hidden state
        layer[f"self_attn.{name}.weight"] = layer[f"self_attn.{name}.weight"].repeat(1, 2)
    weights = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    weights |= {"midlayer.hidden_norm.weight": torch.ones(HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    weights |= {
        "fc.weight": torch.randn(HIDDEN, len(READ) * HIDDEN),
        "lm_head.weight": torch.randn(COMMON["vocab_size"], HIDDEN),
    }
    extra = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": COMMON["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": READ},
    }
    eagle3 = write(folder / "eagle3", {name: tensor.bfloat16() for name, tensor in weights.items()}, config | extra)
    return folder / "model", eagle, eagle3


def glm_with_draft_layer(folder: Path) -> Path:
    """A GLM MoE model that brings a draft layer along, which is right often."""
    model = first_layer_leads(build("glm4_moe", first_k_dense_replace=0, num_nextn_predict_layers=1))
    model.save_pretrained(folder)
    weights, last = load_file(folder / "model.safetensors"), COMMON["num_hidden_layers"]
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    own = {name.replace(".0.", f".{last}.", 1): tensor.clone() for name, tensor in first.items()}
    ones = {f"model.layers.{last}.{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {f"model.layers.{last}.eh_proj.weight": ignoring_the_hidden_state()}
    own |= {name: tensor.bfloat16() for name, tensor in ones.items()}
    save_file(weights | own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
