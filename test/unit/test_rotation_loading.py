"""Clip ratios of a server: those in the file, unless a variable overrides them; the defaults for a file without any."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from oscar_kernels.layout import RowLayout
from oscar_kernels.transform import SideTransform
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.load import recipe_rotation
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.settings import DEFAULT_V_CLIP, Settings

LAYERS, HEAD_DIM = 3, 64
LAYOUT = RowLayout(2, HEAD_DIM, 64)
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
    loaded = load_formats(Settings.from_env(env | override), LAYOUT, range(LAYERS))
    assert list(loaded) == list(range(LAYERS))
    assert tuple(layer.key.transform.clip for layer in loaded.values()) == expected
    assert [layer.value.transform.clip for layer in loaded.values()] == [DEFAULT_V_CLIP] * LAYERS
    assert {side.transform.gain for layer in loaded.values() for _, side in layer.sides} == {0.0}
    assert (
        {layer.key_layout for layer in loaded.values()} == {layer.value_layout for layer in loaded.values()} == {LAYOUT}
    )


def test_gains_reach_the_layers(tmp_path: Path) -> None:
    """Each side has its own; a file without gains, of an older fit, keeps the scales of the range."""
    rotations = recipe_rotation("hadamard", num_layers=LAYERS, head_dim=HEAD_DIM, side="k")
    gains = (1.0, 0.98, 0.96)
    save_rotation_file(tmp_path / "k.safetensors", dataclasses.replace(rotations, gains=gains))
    older = dataclasses.replace(rotations, duals=rotations.rotations.clone(), metadata=RotationMetadata(side="v"))
    save_rotation_file(tmp_path / "v.safetensors", older)
    paths = {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(tmp_path / f"{side}.safetensors") for side in "kv"}
    loaded = load_formats(Settings.from_env(paths | {"SGLANG_OSCAR_RECIPE": "plus"}), LAYOUT, range(LAYERS))
    assert tuple(layer.key.transform.gain for layer in loaded.values()) == gains
    assert [layer.value.transform.gain for layer in loaded.values()] == [0.0] * LAYERS
    with pytest.raises(Int2Error, match="recipe plus, SGLANG_OSCAR_RECIPE asks for paper"):
        load_formats(Settings.from_env(paths | {"SGLANG_OSCAR_RECIPE": "paper"}), LAYOUT, range(LAYERS))


def test_rotations_per_kv_head(tmp_path: Path) -> None:
    """A file with one for every kv head: layer by layer as it stands there, and only for as many heads."""
    generator = torch.Generator().manual_seed(1)
    rotations = torch.linalg.qr(torch.randn(LAYERS, 2, HEAD_DIM, HEAD_DIM, generator=generator).double())[0].float()
    paths = {}
    for side in "kv":
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(tmp_path / f"{side}.safetensors")
        metadata = RotationMetadata(side=side)
        save_rotation_file(tmp_path / f"{side}.safetensors", RotationSet(rotations, metadata=metadata))
    settings = Settings.from_env(paths)
    loaded = load_formats(settings, LAYOUT, range(LAYERS))
    for layer_id, layer in loaded.items():
        for _, side in layer.sides:
            assert side.transform.per_head
            assert torch.equal(side.transform.matrix, rotations[layer_id])
    rank = loaded[1].of_heads(slice(1, 2)).key.transform
    assert torch.equal(rank.matrix, rotations[1, 1:])
    with pytest.raises(Int2Error, match="rotations of 2 kv heads, the model has 4; use this model's file"):
        load_formats(settings, RowLayout(4, HEAD_DIM, 64), range(LAYERS))


def test_identity_has_no_matrix() -> None:
    paths = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": recipe for side, recipe in (("K", "identity"), ("V", "hadamard"))}
    for layer in load_formats(Settings.from_env(paths), LAYOUT, range(LAYERS)).values():
        assert layer.key.transform.matrix is None
        assert layer.value.transform.matrix is not None


def test_bits_are_the_files_own(tmp_path: Path) -> None:
    """By layer and side; a variable may say the same, not something else."""
    rotations = recipe_rotation("hadamard", num_layers=LAYERS, head_dim=HEAD_DIM, side="k")
    save_rotation_file(tmp_path / "k.safetensors", dataclasses.replace(rotations, bits=(3, 2, 4)))
    env = {
        "SGLANG_OSCAR_K_ROTATION_PATH": str(tmp_path / "k.safetensors"),
        "SGLANG_OSCAR_V_ROTATION_PATH": write(tmp_path / "v.safetensors", "v", None),
        "SGLANG_OSCAR_V_BITS": "2",
    }
    loaded = load_formats(Settings.from_env(env), LAYOUT, range(LAYERS))
    assert [layer.key_layout.bits for layer in loaded.values()] == [3, 2, 4]
    assert [layer.value_layout.bits for layer in loaded.values()] == [2, 2, 2]
    assert [layer.key_layout.head_bytes for layer in loaded.values()] == [28, 20, 36]
    for name, message in (("K", r"_K_BITS=2: .*fitted for codes of 2, 3, 4 bits"), ("V", None)):
        other = Settings.from_env(env | {f"SGLANG_OSCAR_{name}_BITS": "2"})
        if message is None:
            assert load_formats(other, LAYOUT, range(LAYERS)).keys() == loaded.keys()
        else:
            with pytest.raises(Int2Error, match=message):
                load_formats(other, LAYOUT, range(LAYERS))
    with pytest.raises(Int2Error, match=r"_V_BITS=3: .*fitted for codes of 2 bits; unset the variable"):
        load_formats(Settings.from_env(env | {"SGLANG_OSCAR_V_BITS": "3"}), LAYOUT, range(LAYERS))


def test_bits_of_built_in_recipes() -> None:
    env = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"}
    loaded = load_formats(Settings.from_env(env | {"SGLANG_OSCAR_K_BITS": "3"}), LAYOUT, range(LAYERS))
    assert {(layer.key_layout.bits, layer.value_layout.bits) for layer in loaded.values()} == {(3, 2)}


def test_a_side_left_exact_is_stored_as_it_is(tmp_path: Path) -> None:
    """Of a built-in recipe, and of a file that states the identity; a matrix that is stated is there. No clip."""
    env = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"}
    exact = env | {"SGLANG_OSCAR_V_BITS": "16", "SGLANG_OSCAR_V_CLIP_RATIO": "0.5"}
    layout = dataclasses.replace(LAYOUT, exact_dtype=torch.float16)
    for layer in load_formats(Settings.from_env(exact), layout, range(LAYERS)).values():
        assert layer.key.transform.matrix is not None
        assert vars(layer.value.transform) == vars(SideTransform())
        assert (layer.value_layout.bits, layer.value_layout.exact_dtype) == (16, torch.float16)
    hadamard = recipe_rotation("hadamard", num_layers=LAYERS, head_dim=HEAD_DIM, side="k").rotations
    matrices = torch.stack([hadamard[0], torch.eye(HEAD_DIM), hadamard[2]])
    centers = torch.zeros(LAYERS, LAYOUT.kv_heads, HEAD_DIM)
    centers[0] = 1
    stated = RotationSet(
        matrices, duals=matrices.clone(), centers=centers, clip_ratios=(0.9, 1.0, 1.0), gains=(0.9, 1.0, 1.0),
        bits=(2, 16, 16), metadata=RotationMetadata(side="k", recipe="plus"),
    )  # fmt: skip
    save_rotation_file(tmp_path / "k.safetensors", stated)
    eye = torch.eye(HEAD_DIM).repeat(LAYERS, 1, 1)
    values = RotationSet(eye, duals=eye.clone(), metadata=RotationMetadata(side="v", recipe="plus"))
    save_rotation_file(tmp_path / "v.safetensors", values)
    files = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(tmp_path / f"{side.lower()}.safetensors") for side in "KV"}
    first, second, third = (
        of.key.transform for of in load_formats(Settings.from_env(files), LAYOUT, range(LAYERS)).values()
    )
    assert (first.gain, second.gain, third.gain) == (0.9, 0.0, 0.0)
    assert second.matrix is second.dual is second.center is third.center is None
    assert third.matrix is not None
    assert torch.equal(third.matrix, hadamard[2])
