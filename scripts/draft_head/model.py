"""A draft head in the manner of EAGLE (Li et al. 2024, arXiv 2401.15077): a layer that guesses the model's next hidden
state from the one before and the token that was chosen.

Names of parameters and order of operations are those of SGLang's ``LlamaForCausalLMEagle``: the layer has no norm in
front of its attention and none behind it all, and embedding and output matrix are the model's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from reference_model.model import MLP, ModelConfig, RMSNorm, rope, rotate_half


class DraftHead(nn.Module):
    """One layer; entry t is made of hidden state t of the model and token t + 1, and stands at position t.

    Args:
        config: shape of the model that it drafts for.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.fc = nn.Linear(2 * config.hidden, config.hidden)
        self.q_proj = nn.Linear(config.hidden, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden, bias=False)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def entries(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """What goes into the layer: hidden states and embeddings [batch, n, hidden] -> [batch, n, hidden]."""
        return self.fc(torch.cat([embedded, hidden], -1))

    def heads(self, projection: nn.Linear, x: torch.Tensor, turned: bool = True) -> torch.Tensor:
        """[batch, n, hidden] -> [batch, heads, n, d], ``turned`` by the positions 0 to n - 1."""
        out = projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        if not turned:
            return out
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = (table.to(out.dtype) for table in rope(positions, self.config.head_dim, self.config.rope_theta))
        return out * cos + rotate_half(out) * sin

    def forward(self, passes: list[torch.Tensor]) -> torch.Tensor:
        """Hidden states that the newest pass guesses.

        A drafted token sees what was accepted before it by the model's hidden states, and itself and the tokens drafted
        just before by the head's own guesses. So the newest pass attends to the first one's keys, but for as many of
        the last positions as there are passes behind the first, of which each gives one diagonal.

        Args:
            passes: entries [batch, n, hidden] by the number of guesses that lie between them and the model's hidden
                states; the first are made of those.

        Returns:
            [batch, n, hidden], with gradients to all passes.
        """
        x, d = passes[-1], self.config.head_dim
        groups = self.config.heads // self.config.kv_heads
        keys = [self.heads(self.k_proj, entry).repeat_interleave(groups, 1) for entry in passes]
        values = [self.heads(self.v_proj, entry, turned=False).repeat_interleave(groups, 1) for entry in passes]
        q, n = self.heads(self.q_proj, x), x.shape[1]
        if len(passes) == 1:
            read = functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            own = len(passes) - 1
            logits = q @ keys[0].mT / d**0.5
            seen = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-own)
            logits = logits.masked_fill(~seen, float("-inf"))
            # Pass p from the end is read p positions back.
            recent = [(back, keys[own - back], values[own - back]) for back in range(own)]
            near = torch.stack([(q * shifted(key, back)).sum(-1) / d**0.5 for back, key, _ in recent], -1)
            position = torch.arange(n, device=x.device)[:, None]
            near = near.masked_fill(position < torch.arange(own, device=x.device), float("-inf"))
            weights = torch.cat([logits, near], -1).float().softmax(-1).to(x.dtype)
            read = weights[..., :n] @ values[0]
            for back, _, value in recent:
                read = read + weights[..., n + back, None] * shifted(value, back)
        x = x + self.o_proj(read.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in BF16, as SGLang loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.to_hf() | {
            "architectures": ["LlamaForCausalLMEagle"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "mlp_bias": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {served_name(name): tensor.detach().cpu().bfloat16() for name, tensor in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def served_name(name: str) -> str:
    """Of a parameter in the checkpoint."""
    if name.startswith("fc."):
        return name
    return f"layers.0.{'self_attn.' if '_proj' in name and not name.startswith('mlp.') else ''}{name}"


def shifted(x: torch.Tensor, back: int) -> torch.Tensor:
    """[batch, heads, n, d] whose row t is row t - ``back`` of ``x``; the first rows are zero."""
    return functional.pad(x, (0, 0, back, 0))[:, :, : x.shape[2]]
