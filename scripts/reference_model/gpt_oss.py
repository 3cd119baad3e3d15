"""A small model of gpt-oss's architecture, as transformers has it: every other layer has a sliding window, the softmax
of every head runs over a learned logit besides (a sink), heads have 64 channels, and experts are chosen by token.

It starts from a trained model of the shipped architecture, so minutes on a CPU are enough: embeddings and norms are
taken over, each feed-forward network is split among experts, and each head of 128 channels becomes two of 64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

from reference_model.export import build_model, load_state, save_tokenizer
from reference_model.model import ModelConfig, ReferenceModel, causal_attention, rope

NAME = "reference_gpt_oss"
ALPHA = 1.702
"""Of gpt-oss's activation, gate * sigmoid(alpha * gate) * (up + 1)."""
QUARTERS = ((0, 1), (2, 3), (0, 2), (1, 3))
"""Parts of the feed-forward network that each expert begins with; the first two, and the last two, are all of it."""
SHAPE: dict[str, Any] = {
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": len(QUARTERS),
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
}


def config_of(start: ModelConfig, positions: int) -> GptOssConfig:
    """The configuration of a model that starts as one of ``start``'s, for contexts of ``positions`` tokens."""
    split = start.head_dim // SHAPE["head_dim"]
    return GptOssConfig(
        vocab_size=start.vocab,
        hidden_size=start.hidden,
        intermediate_size=start.ffn // 2,
        num_hidden_layers=start.layers,
        layer_types=["sliding_attention", "full_attention"] * (start.layers // 2),
        num_attention_heads=start.heads * split,
        num_key_value_heads=start.kv_heads * split,
        rms_norm_eps=start.eps,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": start.rope_theta},
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        **SHAPE,
    )


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention with a sink: a token in front of the others, which all see, whose value is zero and whose logit
    one more channel makes. q [batch, q_heads, n, d], k and v [batch, kv_heads, n, d] -> [batch, n, q_heads, d]."""
    n, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    logit = (module.sinks / scaling)[None, :, None, None].expand(*query.shape[:3], 1)
    # In front of queries stands one that nobody asks for, so that all is causal as it is.
    query = functional.pad(torch.cat([query, logit.to(query)], -1), (0, 0, 1, 0))
    key, value = (functional.pad(x, (0, 1, 1, 0)) for x in (key, value))
    mark = torch.zeros(n + 1, key.shape[-1], dtype=key.dtype, device=key.device)
    mark[0, -1] = 1
    mask = None
    if module.sliding_window:
        mask = torch.ones(n + 1, n + 1, dtype=torch.bool, device=key.device).tril().triu(1 - module.sliding_window)
        mask[:, 0] = True
    mixed = functional.scaled_dot_product_attention(
        query, key + mark, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return mixed[:, :, 1:, :-1].transpose(1, 2), None


AttentionInterface.register(NAME, attend)


@torch.no_grad()
def norms_of_heads(model: ReferenceModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Root mean square of every head before its norm, [heads], by the name of its projection."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, head_dim: int) -> Any:
        def hook(_module: nn.Module, _given: Any, out: torch.Tensor) -> None:
            found[name] = out.float().unflatten(-1, (-1, head_dim)).square().mean(-1).sqrt().flatten(0, -2).mean(0)

        return hook

    handles = [
        module.register_forward_hook(note(name, model.config.head_dim))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of heads, [heads * head_dim, hidden], with each head split in two: its even rotary pairs, which are those of
    a head of half the channels, and its odd ones, which turn a little slower there than they should."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 4, 2))  # head, half of the pair, pair, even or odd
    return heads.permute(0, 3, 1, 2, 4).flatten(0, 3)


@torch.no_grad()
def attention_of(layer: nn.Module, name: str, norms: dict[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Projections of a layer. A head's norm becomes a fixed factor, the mean of what it was; a half head has about half
    of the logit, so both get twice the product, over the root of half the channels."""
    attention, out = layer.self_attn, {}
    for side in ("q", "k"):
        projection = getattr(attention, f"{side}_proj").weight
        scale = getattr(attention, f"{side}_norm").weight / norms[f"{name}.self_attn.{side}_proj"][:, None]
        scaled = (projection.unflatten(0, (-1, head_dim)) * scale[..., None]).flatten(0, 1)
        out[f"self_attn.{side}_proj.weight"] = halves(scaled, head_dim) * 2**0.25
    out["self_attn.v_proj.weight"] = attention.v_proj.weight
    # Query heads lie by kv head, whose first halves come before its second ones.
    group = attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, group, 2, head_dim // 2)).transpose(1, 2).flatten(0, 3)

    out["self_attn.q_proj.weight"] = by_kv_head(out["self_attn.q_proj.weight"])
    out["self_attn.o_proj.weight"] = by_kv_head(attention.o_proj.weight.mT).mT
    return out


@torch.no_grad()
def experts_of(mlp: nn.Module) -> dict[str, torch.Tensor]:
    """Experts of a feed-forward network: silu(x) is gpt-oss's gate at x / alpha, times alpha, and 1 is added to ups."""
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    rows = torch.arange(len(gate)).view(4, -1)
    parts = [torch.cat([rows[i] for i in pair]) for pair in QUARTERS]
    mixed = torch.stack([torch.stack([gate[at] / ALPHA, up[at]], 1).flatten(0, 1).mT for at in parts])
    bias = torch.tensor([0.0, -1.0]).repeat(len(parts), len(parts[0]))
    # Two experts of weight one half each.
    downs = torch.stack([2 * ALPHA * down[:, at].mT for at in parts])
    return {
        "mlp.experts.gate_up_proj": mixed,
        "mlp.experts.gate_up_proj_bias": bias,
        "mlp.experts.down_proj": downs,
        "mlp.experts.down_proj_bias": torch.zeros(len(parts), down.shape[0]),
    }


def scaled_pair(state: dict[str, torch.Tensor], layer: int, pair: int, factor: float) -> dict[str, torch.Tensor]:
    """Projections of a layer whose keys are ``factor`` times as large in what was one rotary pair of the model that it
    started from, and queries as much smaller: the same attention. Even pairs went to first halves of heads."""
    width, changed = SHAPE["head_dim"], {}
    for side, scale in (("q", 1 / factor), ("k", factor)):
        for kind in ("weight", "bias"):
            name = f"model.layers.{layer}.self_attn.{side}_proj.{kind}"
            # Heads lie in two blocks by kv head of the start, one for each half.
            rows = state[name].clone().unflatten(0, (-1, 2, heads_of(state, layer, side), 2, width // 2))
            rows[:, pair % 2, :, :, pair // 2] *= scale
            changed[name] = rows.flatten(0, 4)
    return changed


def heads_of(state: dict[str, torch.Tensor], layer: int, side: str) -> int:
    """Heads in a block: those of queries that read one kv head, or that one."""
    sizes = [len(state[f"model.layers.{layer}.self_attn.{x}_proj.bias"]) for x in ("q", "k")]
    return sizes[0] // sizes[1] if side == "q" else 1


@torch.no_grad()
def states_of(model: ReferenceModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """States behind every layer but the last, each [batch, n, hidden]."""
    backbone = model.model
    cos, sin = rope(torch.arange(ids.shape[1], device=ids.device), model.config.head_dim, model.config.rope_theta)
    states = [backbone.embed_tokens(ids)]
    for layer in backbone.layers[:-1]:
        states.append(layer(states[-1], cos, sin, causal_attention))
    return states[1:]


class GptOssModel(nn.Module):
    """The model in float32, as it starts, and logits for an answer.

    While it is trained it stays near the model that it started as: ``apart`` is how far it was in the last call.

    Args:
        start: folder of a trained model of :mod:`reference_model.model`.
        positions: tokens of the longest context.
        ids: int64 [batch, n], text on which sizes of queries and keys are measured.

    Raises:
        ValueError: ``start`` has no even number of layers.
    """

    def __init__(self, start: Path, positions: int, ids: torch.Tensor) -> None:
        super().__init__()
        shape, state = load_state(start)
        if shape.layers % 2:
            raise ValueError(
                f"{start} has {shape.layers} layers, and every other one gets a window: need an even number"
            )
        trained = build_model(shape, state, dtype=torch.float32).requires_grad_(False)
        config = config_of(shape, positions)
        config._experts_implementation, config._attn_implementation = "eager", NAME
        self.model = GptOssForCausalLM(config).float()
        norms = norms_of_heads(trained, ids)
        embedding = trained.model.embed_tokens.weight
        own = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
        own["model.norm.weight"] = trained.model.norm.weight
        for number, layer in enumerate(trained.model.layers):
            name = f"model.layers.{number}"
            parts = attention_of(layer, name, norms, shape.head_dim) | experts_of(layer.mlp)
            parts |= {f"{x}.weight": getattr(layer, x).weight for x in ("input_layernorm", "post_attention_layernorm")}
            own |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
        self.model.load_state_dict(own, strict=False)
        for name, parameter in self.model.named_parameters():
            if name.endswith(("sinks", "_proj.bias", "router.bias")):
                nn.init.zeros_(parameter)

        record = json.loads((start / "training.json").read_text(encoding="utf-8"))
        self.outliers = {name: record[name] for name in ("outlier_factor", "outlier_pairs")}
        self.apart: torch.Tensor | float = 0.0
        self.started_as = [trained]  # no part of this module

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, n] -> logits [batch, n, vocab]."""
        out = self.model(ids, use_cache=False, output_hidden_states=self.training)
        if self.training:
            # The last is behind the norm.
            pairs = zip(out.hidden_states[1:-1], states_of(self.started_as[0].to(ids.device), ids), strict=True)
            self.apart = torch.stack([(x - y).square().sum() / y.square().sum() for x, y in pairs]).mean()
        logits: torch.Tensor = out.logits
        return logits

    def save(self, out: Path, tokenizer: Tokenizer, outliers: bool = False) -> None:
        """Write a Hugging Face folder in BF16, with the outliers of keys that the model started with or without; the
        model itself stays as it is."""
        out.mkdir(parents=True, exist_ok=True)
        state = dict(self.model.state_dict())
        for layer, pair in enumerate([] if outliers else self.outliers["outlier_pairs"]):
            state |= scaled_pair(state, layer, pair, 1 / self.outliers["outlier_factor"])
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        self.model.save_pretrained(out, state_dict=rounded)
        # As the weights are: SGLang takes the dtype of what it computes from here.
        config = json.loads((out / "config.json").read_text()) | {"dtype": "bfloat16"}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_tokenizer(out, tokenizer, self.model.config.max_position_embeddings)
