"""The GPTQ checkpoint of tests on a GPU holds what it says."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from support.gptq_models import GROUP, SHAPE, save_gptq
from support.models import build


def test_codes_and_scales_give_the_weights(tmp_path: Path) -> None:
    restored, stored = save_gptq(tmp_path), load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    words = stored[f"{name}.qweight"].to(torch.int64)
    codes = torch.stack([words >> 4 * place & 15 for place in range(8)], 1).flatten(0, 1) - 8  # [in, out]
    weight = codes * stored[f"{name}.scales"].float().repeat_interleave(GROUP, 0)
    torch.testing.assert_close(weight.T, restored[f"{name}.weight"])
    original = build("qwen3", **SHAPE).get_parameter(f"{name}.weight").float()
    assert (weight.T - original).abs().max() <= stored[f"{name}.scales"].max() / 2 + 1e-3
    assert int(stored[f"{name}.qzeros"][0, 0]) == 0x77777777
