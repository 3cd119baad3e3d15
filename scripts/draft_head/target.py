"""The frozen target: what it hands to a draft head, what it predicts, and its greedy answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Qwen3ForCausalLM

from draft_head.head import DraftHead, read_layers
from reference_model.model import ModelConfig


class Handed(NamedTuple):
    """Of a text: embeddings [batch, n, hidden], features [batch, n, reads * hidden], logits [batch, n, vocab]."""

    embeddings: torch.Tensor
    features: torch.Tensor
    logits: torch.Tensor


class Target:
    """A ``Qwen3ForCausalLM`` in float32.

    Args:
        folder: model folder, as train_reference_model.py writes it.
        device: where it runs.

    Raises:
        ValueError: the folder holds another architecture.
    """

    def __init__(self, folder: Path, device: str) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["architectures"] != ["Qwen3ForCausalLM"]:
            raise ValueError(f"{folder} holds {config['architectures'][0]}; heads are made for Qwen3ForCausalLM")
        self.config, self.device = ModelConfig.from_hf(config), device
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.model.requires_grad_(False)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> Handed:
        """What the target makes of ids, int64 [batch, n]. ``hidden_states[i]`` is what goes into layer i."""
        out = self.model(ids, output_hidden_states=True, use_cache=False)
        states = out.hidden_states
        features = torch.cat([states[layer + 1] for layer in read_layers(self.config.layers)], -1)
        return Handed(states[0], features, out.logits)

    def new_head(self) -> DraftHead:
        """An untrained head that begins with the target's last norm and output matrix."""
        head = DraftHead(self.config).to(self.device)
        head.start_from(self.model.model.norm.weight, self.model.lm_head.weight)
        return head

    @torch.no_grad()
    def answer(self, ids: list[int], tokens: int) -> list[int]:
        """The greedy continuation of ids by exactly ``tokens`` tokens, whatever they are."""
        out = self.model(torch.tensor([ids], device=self.device), use_cache=True, logits_to_keep=1)
        chosen = [int(out.logits[0, -1].argmax())]
        while len(chosen) < tokens:
            last = torch.tensor([chosen[-1:]], device=self.device)
            out = self.model(last, past_key_values=out.past_key_values, use_cache=True)
            chosen.append(int(out.logits[0, -1].argmax()))
        return chosen
