"""Codings of a server: those of its rotation files, each layer's and each rank's own, and what variables ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.format import code_widths, fingerprint, mean_bits
from oscar_kernels.layout import RowLayout
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.rotation_source import cache
from sglang_oscar.rotation_source.cache import Calibration
from sglang_oscar.settings import Settings

LAYERS, HEADS, HEAD_DIM = 3, 2, 64
LAYOUT = RowLayout(HEADS, HEAD_DIM, 64)


def books() -> list[Codebook | None]:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(2, HEADS, HEAD_DIM // 4, 256, 4, generator=generator)
    return [Codebook.from_points(points[0]), None, Codebook.from_points(points[1])]


def saved(folder: Path, **key_changes: object) -> dict[str, str]:
    """Keys of two layers with codebooks and of one with affine codes of three bits; symmetric values."""
    unit = torch.eye(HEAD_DIM).repeat(LAYERS, 1, 1)
    key = RotationSet(
        unit, bits=(2, 3, 2), codings=("codebook", "affine", "codebook"), codebooks=Codebooks.of_layers(books()),
        metadata=RotationMetadata(side="k", recipe="focus"),
    )  # fmt: skip
    value = RotationSet(unit, codings=("symmetric",) * LAYERS, metadata=RotationMetadata(side="v", recipe="focus"))
    save_rotation_file(folder / "k.safetensors", replace(key, **key_changes))  # type: ignore[arg-type]
    save_rotation_file(folder / "v.safetensors", value)
    return {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(folder / f"{side}.safetensors") for side in "kv"}


def test_what_files_state_is_served(tmp_path: Path) -> None:
    formats = load_formats(Settings.from_env(saved(tmp_path)), LAYOUT, range(LAYERS))
    assert [(of.key.coding, of.key.bits) for of in formats.values()] == [
        ("codebook", 2),
        ("affine", 3),
        ("codebook", 2),
    ]
    assert {of.value.coding for of in formats.values()} == {"symmetric"}
    for layer, book in enumerate(books()):
        found = formats[layer].key.codebook
        assert (found is None) == (book is None)
        if found is not None and book is not None:
            assert torch.equal(found.points, book.points)
            rank = formats[layer].of_heads(slice(1, 2)).key.codebook
            assert rank is not None
            assert torch.equal(rank.points, book.points[1:])
    assert code_widths(formats.values()) == "keys 2 to 3 (affine, codebook), values 2 (symmetric)"
    # A scale of 16 bits for 64 channels, but two numbers for keys of three bits.
    assert mean_bits(formats.values()) == (5 * 2.25 + 3.5) / 6
    settings = Settings.from_env({})
    assert Geometry(formats, settings.windows, torch.bfloat16).group_sizes == [64]


def test_other_points_are_another_format(tmp_path: Path) -> None:
    """What storage, transfer and the host tier are salted with."""
    first = load_formats(Settings.from_env(saved(tmp_path)), LAYOUT, range(LAYERS))
    other = books()
    assert other[0] is not None
    changed = Codebook(other[0].points.roll(1, 2).contiguous(), other[0].factor)
    second = saved(tmp_path, codebooks=Codebooks.of_layers([changed, *other[1:]]))
    assert fingerprint(first) != fingerprint(load_formats(Settings.from_env(second), LAYOUT, range(LAYERS)))


def test_files_of_other_heads_and_other_codings_are_refused(tmp_path: Path) -> None:
    env = saved(tmp_path)
    with pytest.raises(Int2Error, match="codebooks of 2 kv heads, the model has 4; use this model's file"):
        load_formats(Settings.from_env(env), RowLayout(4, HEAD_DIM, 64), range(LAYERS))
    load_formats(Settings.from_env(env | {"SGLANG_OSCAR_K_CODING": "codebook"}), LAYOUT, range(LAYERS))
    message = "SGLANG_OSCAR_V_CODING=affine: .* codes that are symmetric; unset the variable, or fit a file with"
    with pytest.raises(Int2Error, match=message):
        load_formats(Settings.from_env(env | {"SGLANG_OSCAR_V_CODING": "affine"}), LAYOUT, range(LAYERS))


def test_built_in_recipes_have_symmetric_values_at_most() -> None:
    env = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"}
    asked = env | {"SGLANG_OSCAR_V_CODING": "symmetric"}
    formats = load_formats(Settings.from_env(asked), LAYOUT, range(LAYERS))
    assert {(of.key.coding, of.value.coding) for of in formats.values()} == {("affine", "symmetric")}
    with pytest.raises(Int2Error, match="hadamard has no codebooks"):
        load_formats(Settings.from_env(env | {"SGLANG_OSCAR_K_CODING": "codebook"}), LAYOUT, range(LAYERS))


def test_calibrations_of_other_codings_are_others() -> None:
    """Those of affine codes keep the folder that they had before there were others."""

    def key(**env: str) -> str:
        settings = Settings.from_env({f"SGLANG_OSCAR_{name}": value for name, value in env.items()})
        codings = cache._codings(settings)
        return Calibration("w", "m", None, 8192, 128, cache.bits_of(settings), **codings).key  # type: ignore[arg-type]

    assert key() == key(V_CODING="affine") == "16d1799ad24f80440161"
    assert len({key(), key(V_CODING="symmetric"), key(K_BITS="2"), key(K_BITS="2", K_CODING="codebook")}) == 4
    with pytest.raises(Int2Error, match="K_CODING=codebook is not of codes of 3 bits; set SGLANG_OSCAR_K_BITS=2"):
        key(K_CODING="codebook")
    with pytest.raises(Int2Error, match="V_CODING=symmetric is not of codes of 16 bits"):
        key(V_CODING="symmetric", V_BITS="16")
    with pytest.raises(Int2Error, match="no meaning for the recipe paper"):
        key(V_CODING="symmetric", RECIPE="paper")
