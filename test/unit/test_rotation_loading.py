"""Clip ratios of a server: those in the file, unless a variable overrides them; the defaults for a file without any."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from oscar_rotation.files.rotation_file import recipe_rotation, save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.build import layer_params
from sglang_oscar.settings import DEFAULT_V_CLIP, Settings
from sglang_oscar.weights.rotations import load_rotations

LAYERS, HEAD_DIM = 3, 64
STORED = (0.96, 0.8, 1.0)


def write(path: Path, side: str, clips: tuple[float, ...] | None) -> str:
    rotations = recipe_rotation("hadamard", num_layers=LAYERS, head_dim=HEAD_DIM, side=side)  # type: ignore[arg-type]
    save_rotation_file(path, dataclasses.replace(rotations, clip_ratios=clips))
    return str(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(("override", "expected"), [({}, STORED), ({"SGLANG_OSCAR_K_CLIP_RATIO": "0.9"}, (0.9,) * 3)])
def test_clip_ratios(tmp_path: Path, suffix: str, override: dict[str, str], expected: tuple[float, ...]) -> None:
    env = {
        "SGLANG_OSCAR_K_ROTATION_PATH": write(tmp_path / f"k{suffix}", "k", STORED),
        "SGLANG_OSCAR_V_ROTATION_PATH": write(tmp_path / f"v{suffix}", "v", None),
    }
    loaded = load_rotations(Settings.from_env(env | override), LAYERS, HEAD_DIM)
    assert tuple(loaded.key.clip_ratios) == expected
    assert loaded.value.clip_ratios == [DEFAULT_V_CLIP] * LAYERS
    assert loaded.key.gains == loaded.value.gains == (0.0,) * LAYERS


def test_gains_reach_the_layers(tmp_path: Path) -> None:
    """Each side has its own; a file without gains, of an older fit, keeps the scales of the range."""
    rotations = recipe_rotation("hadamard", num_layers=LAYERS, head_dim=HEAD_DIM, side="k")
    gains = (1.0, 0.98, 0.96)
    save_rotation_file(tmp_path / "k.safetensors", dataclasses.replace(rotations, gains=gains))
    older = dataclasses.replace(rotations, duals=rotations.rotations.clone(), metadata=RotationMetadata(side="v"))
    save_rotation_file(tmp_path / "v.safetensors", older)
    paths = {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(tmp_path / f"{side}.safetensors") for side in "kv"}
    loaded = load_rotations(Settings.from_env(paths | {"SGLANG_OSCAR_RECIPE": "plus"}), LAYERS, HEAD_DIM)
    layers = layer_params(loaded, [SimpleNamespace()] * LAYERS, "cpu", False, slice(0, 1))
    assert tuple(layer.k_gain for layer in layers) == gains
    assert [layer.v_gain for layer in layers] == [0.0] * LAYERS
    with pytest.raises(Int2Error, match="recipe plus, SGLANG_OSCAR_RECIPE is paper"):
        load_rotations(Settings.from_env(paths), LAYERS, HEAD_DIM)
