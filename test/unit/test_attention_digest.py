"""Weights are told apart by what their attention holds: copies agree wherever they lie, trained ones do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_oscar.formats.content import attention_digest


def weights(folder: Path, *, shards: int = 1, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> str:
    """The digest of a model of two layers in a new folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": torch.randn(64, 64, generator=generator).to(dtype)
        for layer in range(2)
        for name in "qkvo"
    }
    tensors["model.embed_tokens.weight"] = torch.randn(8, 64)
    folder.mkdir()
    names = list(tensors)
    for shard in range(shards):
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / f"model-{shard}.safetensors")
    return attention_digest(str(folder))


def test_copies_and_other_weights(tmp_path: Path) -> None:
    one = weights(tmp_path / "one")
    assert one == weights(tmp_path / "copy") == weights(tmp_path / "sharded", shards=3)
    trained, quantized = weights(tmp_path / "trained", seed=1), weights(tmp_path / "half", dtype=torch.float16)
    assert [of.split(":")[0] == one.split(":")[0] for of in (trained, quantized)] == [True, False]
    assert len({one, trained, quantized}) == 3


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{}"])
def test_weights_that_are_not_known(tmp_path: Path, content: bytes | None) -> None:
    """No files, or none that can be read: whoever loads them says what is wrong."""
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert attention_digest(str(tmp_path)) == ""
    assert attention_digest("nobody/no-such-model") == ""
