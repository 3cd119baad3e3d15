"""FP8 checkpoints of the reference model, in the two formats that large models come in.

``block``: a scale per 128 x 128 block of a weight, as FP8 releases of DeepSeek and Qwen (``quant_method`` fp8). Blocks
need a hidden size that is a multiple of 128, so the model is widened from 192 to 256 first, by channels that are zero
everywhere: up to rounding, the same model.
``tensor``: one scale per weight, as llm-compressor writes it (``quant_method`` compressed-tensors).

Activations are quantized at run time in both. Projections are quantized; embeddings and norms are not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODEL = Path(__file__).resolve().parents[2] / "models" / "reference"
BLOCK = 128
WIDE = 256
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
TENSOR_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBER, "strategy": "tensor", "dynamic": False},
            "input_activations": {**_NUMBER, "strategy": "token", "dynamic": True},
        }
    },
}


def widen(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same model with a hidden size of ``WIDE``; the new channels are zero.

    RMS norms take the mean over more channels, which their weights and epsilon make up for.
    """
    narrow, share = config["hidden_size"], config["hidden_size"] / WIDE
    out = {}
    for name, weight in weights.items():
        norm = name.endswith("norm.weight") and weight.shape == (narrow,)
        scaled = (weight.double() * share**0.5).to(weight.dtype) if norm else weight
        # pad counts from the last axis on.
        new = [count for size in reversed(weight.shape) for count in (0, WIDE - narrow if size == narrow else 0)]
        out[name] = torch.nn.functional.pad(scaled, new)
    return out, config | {"hidden_size": WIDE, "rms_norm_eps": config["rms_norm_eps"] * share}


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 weight, and float32 scales [rows / 128, columns / 128] that restore it by multiplication."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    return (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn), scale[:, 0, :, 0].contiguous()


def quantize_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 weight and the float32 scale [1] that restores it."""
    scale = weight.float().abs().max().clamp(min=1e-12) / LARGEST
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale.reshape(1)


def quantize(scheme: str, out: Path, model: Path = MODEL) -> Path:
    """Write an FP8 checkpoint of ``model`` to ``out`` and return it.

    Args:
        scheme: ``block`` or ``tensor``.
        out: folder to make.
        model: checkpoint in one safetensors file.
    """
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    if scheme == "block":
        weights, config = widen(weights, config)
    made: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            made[name] = weight
        elif scheme == "block":
            made[name], made[f"{name}_scale_inv"] = quantize_blocks(weight)
        else:
            made[name], made[f"{name}_scale"] = quantize_tensor(weight)
    out.mkdir(parents=True, exist_ok=True)
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = BLOCK_CONFIG if scheme == "block" else TENSOR_CONFIG
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, out / name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", choices=["block", "tensor"])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    quantize(args.scheme, args.out)


if __name__ == "__main__":
    main()
