"""FP8 checkpoints of the reference model hold the reference model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.reference import MODEL, token_ids

from reference_model.quantize_fp8 import BLOCK, WIDE, quantize, widen  # isort: skip (support.reference finds it)

# e4m3 has 3 bits of mantissa: half a step is 2^-4 of a normal number, and 2^-10 of a scale near zero.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


def restored(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint in float32, scales multiplied in."""
    stored, out = load_file(folder / "model.safetensors"), {}
    for name, weight in stored.items():
        if f"{name}_scale_inv" in stored:
            scale = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            out[name] = weight.float() * scale
        elif f"{name}_scale" in stored:
            out[name] = weight.float() * stored[f"{name}_scale"]
        elif not name.endswith(("_scale", "_scale_inv")):
            out[name] = weight.float()
    return out


@pytest.mark.parametrize("scheme", ["block", "tensor"])
def test_weights_are_within_a_rounding_of_fp8(scheme: str, tmp_path: Path) -> None:
    folder = quantize(scheme, tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    wanted = load_file(MODEL / "model.safetensors")
    if scheme == "block":
        wanted, _ = widen(wanted, json.loads((MODEL / "config.json").read_text()))
        assert config["hidden_size"] == WIDE
    stored = load_file(folder / "model.safetensors")
    found = restored(folder)
    assert found.keys() == wanted.keys()
    quantized = [name for name in stored if stored[name].dtype == torch.float8_e4m3fn]
    assert len(quantized) == 7 * config["num_hidden_layers"]
    for name, weight in wanted.items():
        want = weight.float()
        if name not in quantized:
            assert torch.equal(found[name], want)
            continue
        bound = RELATIVE * want.abs() + ABSOLUTE * want.abs().max()
        assert ((found[name] - want).abs() <= bound).all(), name
        assert not torch.equal(found[name], want)


def test_wide_model_is_the_same_model() -> None:
    """In float64. What is left is the epsilon of query and key norms, which changes with that of the others."""
    config = json.loads((MODEL / "config.json").read_text())
    weights = {name: weight.double() for name, weight in load_file(MODEL / "model.safetensors").items()}
    ids = torch.tensor([token_ids("def merge(values):\n    return sorted(values)\n# The magic number for amber is 7")])
    logits = []
    for own, shape in ((weights, config), widen(weights, config)):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).double().eval()
        missing, unexpected = model.load_state_dict(own, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        with torch.no_grad():
            logits.append(model(ids).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3)
