"""A shared file on a model with few kv heads is warned of, once and with the way out; others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oscar_kernels.layout import RowLayout
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.formats.sharing import FEW_HEADS, sharing_warning
from sglang_oscar.settings import Settings

LAYERS, HEAD_DIM = 2, 64


def warning(folder: Path, kv_heads: int, per_head: bool, values_per_head: bool = False) -> str | None:
    """What a server of ``kv_heads`` kv heads would warn of with such files."""
    paths = {}
    for side, own in (("k", per_head), ("v", values_per_head)):
        shape = (LAYERS, kv_heads, HEAD_DIM, HEAD_DIM) if own else (LAYERS, HEAD_DIM, HEAD_DIM)
        rotations = torch.eye(HEAD_DIM).expand(shape).contiguous()
        path = folder / f"{side}_{kv_heads}_{own}.pt"
        save_rotation_file(path, RotationSet(rotations, metadata=RotationMetadata(side=side)))
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(path)
    settings = Settings.from_env(paths)
    return sharing_warning(settings, load_formats(settings, RowLayout(kv_heads, HEAD_DIM, 64), range(LAYERS)))


@pytest.mark.parametrize("kv_heads", [2, FEW_HEADS])
def test_few_heads_with_one_rotation(tmp_path: Path, kv_heads: int) -> None:
    found = warning(tmp_path, kv_heads, per_head=False)
    assert found is not None
    assert "\n" not in found
    assert f"one key transform per layer for {kv_heads} kv heads" in found
    assert str(tmp_path) in found
    for remedy in ("oscar fit --recipe focus", "--share kv_head"):
        assert remedy in found


@pytest.mark.parametrize(
    ("kv_heads", "per_head", "values"), [(1, False, False), (8, False, False), (4, True, False), (4, True, True)]
)
def test_no_warning(tmp_path: Path, kv_heads: int, per_head: bool, values: bool) -> None:
    """One head has nothing to share, many share well, and values of most recipes are shared anyway."""
    assert warning(tmp_path, kv_heads, per_head, values) is None


def test_built_in_recipes_are_not_warned_of() -> None:
    settings = Settings.from_env({f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"})
    assert sharing_warning(settings, load_formats(settings, RowLayout(2, HEAD_DIM, 64), range(LAYERS))) is None


def test_layers_left_exact_share_nothing(tmp_path: Path) -> None:
    """One such layer among those with a matrix per kv head is no reason to warn."""
    paths = {}
    for side, shape in (("k", (LAYERS, 2, HEAD_DIM, HEAD_DIM)), ("v", (LAYERS, HEAD_DIM, HEAD_DIM))):
        matrices = torch.eye(HEAD_DIM).expand(shape).flip(-1).contiguous()
        matrices[1] = torch.eye(HEAD_DIM)
        path = tmp_path / f"{side}.safetensors"
        bits = (2, 16) if side == "k" else None
        save_rotation_file(path, RotationSet(matrices, metadata=RotationMetadata(side=side, recipe="plus"), bits=bits))
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(path)
    settings = Settings.from_env(paths)
    assert sharing_warning(settings, load_formats(settings, RowLayout(2, HEAD_DIM, 64), range(LAYERS))) is None
