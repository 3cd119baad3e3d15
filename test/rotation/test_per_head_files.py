"""Rotation files with a matrix per kv head: version 2 of the public schema, and between it and safetensors."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.load import load_rotation

runner = CliRunner()
HEADS = 2


@pytest.fixture
def per_head(rotation_set: RotationSet) -> RotationSet:
    """The three layers of ``rotation_set`` with two heads each, which differ."""
    assert rotation_set.eigenvalues is not None
    pairs = [torch.stack([x, x.roll(1, 0)], 1) for x in (rotation_set.rotations, rotation_set.eigenvalues)]
    return dataclasses.replace(rotation_set, rotations=pairs[0], eigenvalues=pairs[1])


def published(per_head: RotationSet) -> dict[str, Any]:
    """A file as the schema's authors write it: nothing but matrices."""
    layers = {i: {"layer_id": i, "rotation": rotation.clone()} for i, rotation in enumerate(per_head.rotations)}
    return {"format_version": 2, "objective": "qqt", "source_grouping": "kv_head", "layers": layers}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_round_trip(tmp_path: Path, per_head: RotationSet, suffix: str) -> None:
    path = tmp_path / f"k{suffix}"
    save_rotation_file(path, per_head)
    loaded = load_rotation(path, num_layers=3, head_dim=64, side="k")
    assert loaded.per_head
    assert loaded.rotations.shape == (3, HEADS, 64, 64)
    assert loaded.eigenvalues is not None
    assert per_head.eigenvalues is not None
    assert torch.equal(loaded.rotations, per_head.rotations)
    assert torch.equal(loaded.eigenvalues, per_head.eigenvalues)
    assert (loaded.clip_ratios, loaded.metadata) == (per_head.clip_ratios, per_head.metadata)
    assert loaded.recipe == "paper"


def test_public_files_are_read(tmp_path: Path, per_head: RotationSet) -> None:
    torch.save(published(per_head), tmp_path / "k_rotation_perhead.pt")
    loaded = load_rotation(tmp_path / "k_rotation_perhead.pt", num_layers=3, head_dim=64, side="k")
    assert torch.equal(loaded.rotations, per_head.rotations)
    assert loaded.eigenvalues is None


def test_written_files_have_the_public_schema(tmp_path: Path, per_head: RotationSet) -> None:
    """Version 2 for a matrix per head and 1 for one per layer; storages of their own, so no file drags others along."""
    save_rotation_file(tmp_path / "k.pt", per_head)
    content, wanted = torch.load(tmp_path / "k.pt", weights_only=True), published(per_head)
    for name in ("format_version", "objective", "source_grouping"):
        assert content[name] == wanted[name]
    for layer, entry in content["layers"].items():
        assert torch.equal(entry["rotation"], wanted["layers"][layer]["rotation"])
        assert entry["eigenvalues"].shape == (HEADS, 64)
    shared = dataclasses.replace(per_head, rotations=per_head.rotations[:, 0], eigenvalues=None)
    save_rotation_file(tmp_path / "shared.pt", shared)
    content = torch.load(tmp_path / "shared.pt", weights_only=True)
    assert (content["format_version"], content["source_grouping"]) == (1, "layer")
    assert (tmp_path / "shared.pt").stat().st_size < (tmp_path / "k.pt").stat().st_size


def test_conversion_both_ways_keeps_everything(tmp_path: Path, per_head: RotationSet) -> None:
    files = [tmp_path / name for name in ("k_rotation_perhead.pt", "k.safetensors", "back.pt")]
    save_rotation_file(files[0], per_head)
    for source, target in pairwise(files):
        result = runner.invoke(app, ["convert", str(source), str(target)])
        assert result.exit_code == 0, result.output
        assert torch.equal(read_rotation_file(target).rotations, per_head.rotations)
        assert read_rotation_file(target).metadata == per_head.metadata
    assert torch.load(files[-1], weights_only=True)["format_version"] == 2


def test_a_public_file_gets_its_side_from_its_name(tmp_path: Path, per_head: RotationSet) -> None:
    source, target = tmp_path / "v_rotation_perhead.pt", tmp_path / "v.safetensors"
    torch.save(published(per_head) | {"objective": "per-head"}, source)
    assert runner.invoke(app, ["convert", str(source), str(target)]).exit_code == 0
    assert read_rotation_file(target).metadata.side == "v"


def test_one_head_that_is_not_orthogonal_is_refused(tmp_path: Path, per_head: RotationSet) -> None:
    content = published(per_head)
    content["layers"][1]["rotation"][1] *= 1.01
    torch.save(content, tmp_path / "k.pt")
    with pytest.raises(RotationFileError, match="the rotation of layer 1 is not orthogonal"):
        read_rotation_file(tmp_path / "k.pt")


def test_transforms_of_plus_stay_out_of_the_schema(tmp_path: Path, per_head: RotationSet) -> None:
    more = dataclasses.replace(per_head, duals=per_head.rotations)
    with pytest.raises(RotationFileError, match="holds rotations"):
        save_rotation_file(tmp_path / "k.pt", more)
