"""The draft head: names, shapes and arithmetic of SGLang's ``LlamaForCausalLMEagle3`` with one layer.

What the target hands over for token t are the outputs of three of its layers, side by side and without a norm: the
residual stream as it enters the next layer. From these and the embedding of token t + 1, which the target has chosen,
the head drafts token t + 2. For token t + 3 it takes its own output, before the last norm, in place of what the target
would hand over. The embedding is the target's; the output matrix is the head's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from reference_model.model import MLP, ModelConfig, RMSNorm, rope, rotate_half


def read_layers(layers: int) -> list[int]:
    """Layers of a target whose outputs a head reads: the first, one in the middle, the last but one. The output of the
    last is not handed out, and its choice is known by the token's embedding.

    >>> read_layers(4), read_layers(6)
    ([0, 1, 2], [0, 2, 4])

    Raises:
        ValueError: the target has fewer than two layers.
    """
    if layers < 2:
        raise ValueError("a target needs two layers at least: the output of its last one is not handed out")
    return sorted({0, (layers - 2) // 2, layers - 2})


class DraftAttention(nn.Module):
    """Attention of embedding and hidden state side by side, without norms of q and k."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden, q_width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden, bias=False)

    def project(self, x: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [batch, n, 2 hidden] at positions start.. -> q, k, v [batch, q_heads, n, head_dim]."""
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        groups = self.config.heads // self.config.kv_heads
        return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


class DraftLayer(nn.Module):
    """The layer; a norm each for embedding and hidden state in place of one before attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.hidden_norm = RMSNorm(config.hidden, config.eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)


class DraftHead(nn.Module):
    """The head; parameters have the names of the published EAGLE3 checkpoints.

    Args:
        config: of the target. Widths and heads of the head are the target's.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.reads = config, read_layers(config.layers)
        self.fc = nn.Linear(len(self.reads) * config.hidden, config.hidden, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @torch.no_grad()
    def start_from(self, norm: torch.Tensor, output: torch.Tensor) -> None:
        """Begin as the target's last norm and output matrix on what the last layer that is read hands over.

        Args:
            norm: [hidden], the target's last norm.
            output: [vocab, hidden], its output matrix.
        """
        self.norm.weight.copy_(norm)
        self.lm_head.weight.copy_(output)
        self.fc.weight[:, -self.config.hidden :] += torch.eye(self.config.hidden, device=self.fc.weight.device)

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Draft ``steps`` tokens behind every token but the last few, all chains at once.

        Chain t begins where token t + 1 is known. Step s of it takes token t + 1 + s and predicts the one behind it; it
        sees what the target handed over up to token t, as the cache of a served head has it, and its own chain behind
        that.

        Args:
            embeddings: [batch, n, hidden], the target's embeddings of a text.
            features: [batch, n, reads * hidden], what the target handed over.
            steps: drafts of a chain.

        Returns:
            for every step, logits [batch, n - steps, vocab]; those of chain t are of token t + 2 + step.
        """
        layer, count = self.midlayer, embeddings.shape[1] - steps
        state = self.fc(features[:, :count])
        ones = torch.ones(count, count, dtype=torch.bool, device=state.device)
        earlier, itself = ones.tril(), torch.eye(count, dtype=torch.bool, device=state.device)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for step in range(steps):
            embedded = layer.input_layernorm(embeddings[:, step + 1 : step + 1 + count])
            q, k, v = layer.self_attn.project(torch.cat([embedded, layer.hidden_norm(state)], -1), step)
            keys.append(k)
            values.append(v)
            mask = torch.cat([earlier, *[itself] * step], -1)
            found = functional.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), mask)
            state = state + layer.self_attn.o_proj(found.transpose(1, 2).flatten(2))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            logits.append(self.lm_head(self.norm(state)))
        return logits

    def to_hf(self) -> dict:
        """config.json that SGLang serves it by."""
        own = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": self.config.vocab,
            "mlp_bias": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.reads},
        }
        qwen3_only = ("use_sliding_window", "sliding_window", "max_window_layers")
        return {name: value for name, value in self.config.to_hf().items() if name not in qwen3_only} | own

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (BF16)."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in self.state_dict().items()}
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.to_hf(), indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path, config: ModelConfig) -> DraftHead:
    """A head that :meth:`DraftHead.save` wrote, in float32.

    Args:
        folder: with the head.
        config: of its target.

    Raises:
        RuntimeError: names or shapes are not those of a head for this target.
    """
    head = DraftHead(config)
    head.load_state_dict(load_file(str(folder / "model.safetensors")))
    return head.eval()
