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

from support import hybrid_models
from support.models import COMMON, build

HIDDEN = COMMON["hidden_size"]
FP8_CACHE = ["--speculative-draft-kv-cache-dtype", "fp8_e4m3"]
"""Flags of a server whose draft model has its cache in FP8; ``fp8_drafts_plugin`` lets it have one on a CPU."""
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
    return folder / "model", eagle_of(model, folder / "eagle"), eagle3_of(model, config, folder / "eagle3")


def gpt_oss_with_drafts(folder: Path) -> tuple[Path, Path, Path]:
    """A gpt-oss model, an EAGLE draft model that is right often, and an EAGLE3 draft model with random weights. The
    first layer that attends to everything leads; it is made a layer of Llama whose MLP does nothing."""
    model = build("gpt_oss")
    leads = model.config.layer_types.index("full_attention")
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(embedding.float() / embedding.float().pow(2).mean(-1, keepdim=True).sqrt())
        for number, layer in enumerate(model.model.layers):
            for name, parameter in layer.named_parameters():
                if number != leads and any(part in name for part in ("o_proj", "down_proj")):
                    parameter.mul_(OTHER_LAYERS)
                elif number == leads and (name.endswith("bias") or "down_proj" in name):
                    parameter.zero_()
                elif number == leads and "sinks" in name:
                    parameter.fill_(-100.0)
        attention = model.model.layers[leads].self_attn
        attention.o_proj.weight.mul_(ATTENTION)
    # SGLang's class takes the dtype of its weights from the configuration alone.
    model.float().save_pretrained(folder / "model")
    llama = build("llama", num_hidden_layers=1)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(llama.model.layers[0].self_attn, name).weight.copy_(getattr(attention, name).weight)
        llama.model.layers[0].mlp.down_proj.weight.zero_()
    return folder / "model", eagle_of(llama, folder / "eagle"), eagle3_beside(folder / "eagle3")


def eagle_of(llama: Any, folder: Path) -> Path:
    """An EAGLE draft model that is the first layer of a Llama model, one token late."""
    weights = {f"layers.0.{name}": tensor for name, tensor in first_layer(llama).items() if "input_layern" not in name}
    weights |= {"fc.weight": ignoring_the_hidden_state(), "fc.bias": torch.zeros(HIDDEN).bfloat16()}
    config = llama.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}
    return write(folder, weights, config)


def eagle3_of(llama: Any, config: dict[str, Any], folder: Path) -> Path:
    """An EAGLE3 draft model with random weights around a layer of a Llama model with that configuration."""
    layer = first_layer(llama)
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
    return write(folder, {name: tensor.bfloat16() for name, tensor in weights.items()}, config | extra)


def trained(drafts: Path, folder: Path) -> Path:
    """An EAGLE draft model with a weight changed."""
    weights = load_file(drafts / "model.safetensors")
    weights["fc.weight"][-1, -1] += 1
    return write(folder, weights, json.loads((drafts / "config.json").read_text()))


def eagle3_beside(folder: Path) -> Path:
    """An EAGLE3 draft model with random weights, for any model of these sizes."""
    llama = build("llama", num_hidden_layers=1)
    return eagle3_of(llama, llama.config.to_dict(), folder)


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


def hybrid_with_draft_layer(architecture: str, folder: Path, **overrides: Any) -> Path:
    """A hybrid model that brings a draft layer along, as published checkpoints do: it is right often, because it is a
    copy of the model's first layer with full attention, which leads, and the layers below add little."""
    model = hybrid_models.build(architecture, **overrides)
    seeing = architecture in hybrid_models.SEEING
    text = model.model.language_model if seeing else model.model
    leads = text.config.layer_types.index("full_attention")
    with torch.no_grad():
        embedding = text.embed_tokens.weight
        embedding.copy_(embedding.float() / embedding.float().pow(2).mean(-1, keepdim=True).sqrt())
        for number, layer in enumerate(text.layers):
            for name, parameter in layer.named_parameters():
                if number != leads and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                    parameter.mul_(OTHER_LAYERS)
        text.layers[leads].self_attn.o_proj.weight.mul_(ATTENTION)
    hybrid_models.write(model, architecture, folder)
    weights = load_file(folder / "model.safetensors")
    prefix = "model.language_model." if seeing else "model."
    layer = f"{prefix}layers.{leads}."
    own = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in weights.items() if name.startswith(layer)}
    own |= {"mtp.fc.weight": ignoring_the_hidden_state(), "mtp.norm.weight": weights[f"{prefix}norm.weight"]}
    # Norms of these models hold what their factor has above one.
    own |= {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(HIDDEN).bfloat16() for name in ("embedding", "hidden")}
    own = {name: tensor.clone() for name, tensor in own.items()}
    save_file(weights | own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
