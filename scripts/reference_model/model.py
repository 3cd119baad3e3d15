"""A minimal Qwen3 in torch: parameter names, order of operations and config are those of ``Qwen3ForCausalLM``.

It exists because training wants a compiled plain module and the INT2 simulation wants to replace the attention
step; both are a few lines here and a patch anywhere else. Attention is a callable, so the simulation passes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [batch, q_heads, n, d], k and v [batch, kv_heads, n, d]; q, k after RoPE) -> [batch, q_heads, n, d]."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; ``head_dim`` is fixed at 128, the width that the codec is specified for."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 4096
    head_dim: int = 128
    rope_theta: float = 1e6
    eps: float = 1e-6
    max_positions: int = 8192

    def to_hf(self) -> dict:
        """config.json of ``Qwen3ForCausalLM``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.layers,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, config: dict) -> ModelConfig:
        """Inverse of :meth:`to_hf`."""
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            head_dim=config["head_dim"],
            rope_theta=config["rope_theta"],
            eps=config["rms_norm_eps"],
            max_positions=config["max_position_embeddings"],
        )

    def replace(self, **changes: object) -> ModelConfig:
        """A copy with some fields changed."""
        return ModelConfig(**{**asdict(self), **changes})  # type: ignore[arg-type]


SIZES = {
    "small": ModelConfig(layers=3, hidden=128, heads=4, kv_heads=2, ffn=384),
    "medium": ModelConfig(layers=4, hidden=192, heads=4, kv_heads=2, ffn=512),
    "large": ModelConfig(layers=6, hidden=384, heads=8, kv_heads=2, ffn=1024),
    "strong": ModelConfig(layers=6, hidden=512, heads=8, kv_heads=4, ffn=1408),
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 and the weight applied in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rope(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [n, head_dim]; channels j and j + head_dim/2 are a pair (NeoX style)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None] * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [..., d]: (a, b) -> (-b, a)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def causal_attention(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact causal attention of a sequence onto itself; shapes as in :data:`Attention`."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class SelfAttention(nn.Module):
    """Projections, per-head norms of q and k, RoPE; the attention itself is the caller's."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x [batch, n, hidden] -> [batch, n, hidden]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return self.o_proj(attention(self.layer, q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, n, hidden] -> [batch, n, hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """[batch, n, hidden] -> [batch, n, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def forward(self, ids: torch.Tensor, start: int = 0, attention: Attention = causal_attention) -> torch.Tensor:
        """ids [batch, n] at positions start.. -> hidden states [batch, n, hidden]."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)


class ReferenceModel(nn.Module):
    """Language model with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        residual_std = 0.02 / (2 * config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, ids: torch.Tensor, start: int = 0, attention: Attention = causal_attention) -> torch.Tensor:
        """ids [batch, n] at positions start.. -> logits [batch, n, vocab]."""
        return functional.linear(self.model(ids, start, attention), self.model.embed_tokens.weight)
