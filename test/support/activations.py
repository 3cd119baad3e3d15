"""Queries, keys and values as attention sees them, from a plain transformers forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from oscar_rotation.dump.writer import DumpWriter
from support import stand_in

RECORDER = "record_activations"
Activations = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
_recorded: Activations = []


def _record(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _recorded.append(tuple(x[0].transpose(0, 1).contiguous() for x in (query, key, value)))  # type: ignore[arg-type]
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(RECORDER, _record)


def load(model: Path) -> Any:
    """The model in BF16, its attention recorded."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=RECORDER)
    return loaded.eval()


def activations(loaded: Any, ids: list[int]) -> Activations:
    """q, k and v of every layer after RoPE: [tokens, heads, head_dim] each."""
    _recorded.clear()
    # A CPU without instructions for BF16 would take most of a fit's time for these products, and for logits.
    linear = stand_in.module("products").linear
    with torch.inference_mode(), patch.object(torch.nn.functional, "linear", linear):
        loaded(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
    return list(_recorded)


def write_dump(model: Path, prompts: Iterable[list[int]], folder: Path) -> Path:
    """A dump as a server would leave it, one chunk per prompt from chunk 1 on."""
    loaded = load(model)
    writer = DumpWriter(folder, total_kv_heads=loaded.config.num_key_value_heads)
    for chunk, ids in enumerate(prompts, start=1):
        for layer, (q, k, v) in enumerate(activations(loaded, ids)):
            writer.write(layer, chunk, q, k, v, [len(ids)])
    return folder
