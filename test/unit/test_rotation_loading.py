"""Clip ratios of a server: those in the file, unless a variable overrides them; the defaults for a file without any."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from oscar_rotation.files import recipe_rotation, save_rotation_file
from sglang_oscar.rotations import load_rotations
from sglang_oscar.settings import DEFAULT_V_CLIP, Settings

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
