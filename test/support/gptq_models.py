"""A small random model whose linear layers are stored as GPTQ does: four bits, rounded to nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models import save

BITS, GROUP, PACK = 4, 128, 8
"""Channels that share a scale; codes in an int32."""
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
"""Multiples of what kernels for GPUs take."""


def packed(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Codes of 4 bits, eight along a dimension in an int32, the first in the lowest bits."""
    parts = codes.to(torch.int64).unflatten(dim, (-1, PACK)).unbind(dim + 1)
    words = torch.stack([part << BITS * place for place, part in enumerate(parts)]).sum(0)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantized(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a linear layer in a checkpoint, and what they stand for: [out, in]."""
    groups = weight.float().T.unflatten(0, (-1, GROUP))  # [groups, GROUP, out]
    scales = (groups.abs().amax(1) / 7).half()
    codes = (groups / scales[:, None].float()).round().clamp(-8, 7)
    stored = {
        "qweight": packed((codes + 8).flatten(0, 1), 0),
        "qzeros": packed(torch.full(scales.shape, 7), 1),
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    restored = (codes * scales[:, None].float()).flatten(0, 1).T
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}, restored


def save_gptq(folder: Path) -> dict[str, torch.Tensor]:
    """Write the checkpoint; returns what its quantized weights stand for, by name."""
    file = save("qwen3", folder, **SHAPE) / "model.safetensors"
    tensors, restored = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, restored[name] = quantized(name.removesuffix(".weight"), tensors.pop(name))
        tensors |= stored
    save_file({name: x.half() if x.is_floating_point() else x for name, x in tensors.items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}
    config |= {"quantization_config": method | {"checkpoint_format": "gptq"}, "torch_dtype": "float16"}
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    return restored
