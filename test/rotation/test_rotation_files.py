"""Rotation files: both formats round trip, and every unusable file is refused in one line."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity
from oscar_rotation.files.rotation_file import read_rotation_file, rotation_file_name, save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.load import load_rotation
from oscar_rotation.math.hadamard import sylvester_hadamard

Content = dict[str, Any]


def zoo_content(rotation_set: RotationSet, key: Callable[[int], Any] = int, objective: str = "qqt") -> Content:
    """A file of the public schema, as its authors write it."""
    assert rotation_set.eigenvalues is not None
    layers = {
        key(i): {"layer_id": i, "rotation": rotation.clone(), "eigenvalues": spectrum.clone()}
        for i, (rotation, spectrum) in enumerate(zip(rotation_set.rotations, rotation_set.eigenvalues, strict=True))
    }
    return {"format_version": 1, "objective": objective, "source_grouping": "layer", "layers": layers}


def refused(path: Path | str, side: str = "k", **changes: Any) -> str:
    wanted: dict[str, Any] = {"num_layers": 3, "head_dim": 64, "side": side, **changes}
    with pytest.raises(RotationFileError) as caught:
        load_rotation(path, **wanted)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_round_trip(tmp_path: Path, rotation_set: RotationSet, suffix: str) -> None:
    path = tmp_path / "new folder" / f"k{suffix}"
    save_rotation_file(path, rotation_set)
    loaded = load_rotation(path, num_layers=3, head_dim=64, side="k", model=ModelIdentity(model_hash="abc123"))
    assert torch.equal(loaded.rotations, rotation_set.rotations)
    assert loaded.eigenvalues is not None
    assert rotation_set.eigenvalues is not None
    assert torch.equal(loaded.eigenvalues, rotation_set.eigenvalues)
    assert loaded.clip_ratios == rotation_set.clip_ratios
    assert loaded.metadata == rotation_set.metadata
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("key", [int, str])
def test_public_schema_loads(tmp_path: Path, rotation_set: RotationSet, key: Callable[[int], Any]) -> None:
    content = zoo_content(rotation_set, key)
    content["layers"] = dict(reversed(content["layers"].items()))
    torch.save(content, tmp_path / "k.pt")
    loaded = load_rotation(tmp_path / "k.pt", num_layers=3, head_dim=64, side="k")
    assert torch.equal(loaded.rotations, rotation_set.rotations)
    assert loaded.clip_ratios is None
    assert loaded.metadata.objective == "qqt"


def test_written_zoo_file_has_the_public_schema(tmp_path: Path, rotation_set: RotationSet) -> None:
    save_rotation_file(tmp_path / "k.pt", rotation_set)
    content = torch.load(tmp_path / "k.pt", weights_only=True)
    expected = zoo_content(rotation_set)
    assert {name: content[name] for name in expected if name != "layers"} == {
        name: value for name, value in expected.items() if name != "layers"
    }
    assert list(content["layers"]) == [0, 1, 2]
    for layer, entry in content["layers"].items():
        assert entry["layer_id"] == layer
        assert torch.equal(entry["rotation"], expected["layers"][layer]["rotation"])
        assert torch.equal(entry["eigenvalues"], expected["layers"][layer]["eigenvalues"])


def test_what_is_written_is_read_back_every_time(tmp_path: Path, rotation_set: RotationSet) -> None:
    for suffix in (".pt", ".safetensors"):
        first, second = tmp_path / "a" / f"k{suffix}", tmp_path / "b" / f"k{suffix}"
        save_rotation_file(first, rotation_set)
        save_rotation_file(second, rotation_set)
        assert torch.equal(read_rotation_file(first).rotations, read_rotation_file(second).rotations)
        assert first.stat().st_mode == second.stat().st_mode


def test_recipes() -> None:
    identity = load_rotation("identity", num_layers=2, head_dim=128, side="v")
    assert torch.equal(identity.rotations, torch.eye(128).expand(2, -1, -1))
    hadamard = load_rotation("hadamard", num_layers=2, head_dim=128, side="k")
    assert torch.equal(hadamard.rotations[1], sylvester_hadamard(128).float())
    assert hadamard.rotations.dtype == torch.float32
    assert hadamard.eigenvalues is None
    assert hadamard.clip_ratios is None
    assert "power of two" in refused("hadamard", head_dim=80)


def test_file_names() -> None:
    assert rotation_file_name("k", "qqt") == "k_rotation_qqt_r_h_pbr.pt"
    assert rotation_file_name("v", "sst") == "v_rotation_sst_r_h_pbr.pt"


def edit(*path: Any, value: Any) -> Callable[[Content], Any]:
    def change(content: Content) -> Any:
        target: Any = content
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value
        return content

    return change


def remove(*path: Any) -> Callable[[Content], Any]:
    def change(content: Content) -> Any:
        target: Any = content
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]
        return content

    return change


def move_entry(content: Content) -> Content:
    content["layers"][5] = content["layers"].pop(1)
    content["layers"][5]["layer_id"] = 5
    return content


def duplicate_entry(content: Content) -> Content:
    content["layers"]["1"] = content["layers"][1]
    return content


def put_nan(content: Content) -> Content:
    content["layers"][2]["rotation"][3, 4] = float("nan")
    return content


def put_infinity(content: Content) -> Content:
    content["layers"][0]["eigenvalues"][0] = float("inf")
    return content


def stretch(content: Content) -> Content:
    content["layers"][1]["rotation"] *= 1.001
    return content


SQUARE = torch.eye(64)
BROKEN_ZOO: dict[str, tuple[Callable[[Content], Any], str]] = {
    "a list": (lambda content: [1, 2], "holds a list"),
    "no layers": (remove("layers"), "missing key ['layers']"),
    "no version": (remove("format_version"), "missing key ['format_version']"),
    "newer version": (edit("format_version", value=3), "format_version is 3"),
    "version of another grouping": (edit("format_version", value=2), "files of format_version 2 have 'kv_head'"),
    "other grouping": (edit("source_grouping", value="head"), "source_grouping is 'head'"),
    "odd objective": (edit("objective", value=3), "objective is a int"),
    "empty layers": (edit("layers", value={}), "non-empty"),
    "list of layers": (edit("layers", value=[SQUARE]), "non-empty dict"),
    "odd layer key": (edit("layers", "first", value={}), "layer key 'first'"),
    "negative layer key": (edit("layers", -1, value={}), "layer key -1"),
    "layer twice": (duplicate_entry, "layer 1 occurs twice"),
    "bare matrix": (edit("layers", 1, value=SQUARE), "layer 1 is a Tensor"),
    "other layer id": (edit("layers", 1, "layer_id", value=2), "layer key 1 holds layer_id 2"),
    "layer gap": (move_entry, "layer 1 is missing"),
    "no rotation": (remove("layers", 2, "rotation"), "'rotation' of layer 2 is missing"),
    "rotation a list": (edit("layers", 2, "rotation", value=[1.0]), "'rotation' of layer 2 is a list"),
    "half precision": (edit("layers", 0, "rotation", value=SQUARE.half()), "torch.float16"),
    "double precision": (edit("layers", 0, "rotation", value=SQUARE.double()), "torch.float64"),
    "not square": (edit("layers", 0, "rotation", value=torch.eye(64, 32)), "shape [64, 32]"),
    "stack of heads": (edit("layers", 0, "rotation", value=SQUARE[None]), "shape [1, 64, 64]"),
    "layers differ": (edit("layers", 2, "rotation", value=torch.eye(32)), "'rotation' of layer 2 has shape [32, 32]"),
    "eigenvalues missing": (remove("layers", 1, "eigenvalues"), "layer 1 has no 'eigenvalues'"),
    "eigenvalues short": (edit("layers", 1, "eigenvalues", value=torch.ones(63)), "'eigenvalues' of layer 1"),
    "not a number": (put_nan, "layer 2 holds NaN"),
    "infinite eigenvalue": (put_infinity, "eigenvalues hold NaN or infinite"),
    "not orthogonal": (stretch, "layer 1 is not orthogonal: max |R^T R - I| is 0.002, allowed is 0.001"),
    "zeros": (edit("layers", 0, "rotation", value=torch.zeros(64, 64)), "layer 0 is not orthogonal"),
    "odd metadata": (edit("metadata", value={"side": 1}), "strings to strings"),
    "odd clip": (edit("metadata", value={"clip_ratios": "0.9"}), "'metadata' cannot be read"),
    "two clips": (edit("metadata", value={"clip_ratios": "[0.9, 0.9]"}), "2 clip ratios for 3 layers"),
    "clip outside": (edit("metadata", value={"clip_ratios": "[0.9, 1.5, 1]"}), "clip ratio 1.5"),
    "other side": (edit("objective", value="sst_r_h_pbr"), "is a V rotation"),
}


@pytest.mark.parametrize("kind", BROKEN_ZOO)
def test_broken_zoo_file_is_refused(tmp_path: Path, rotation_set: RotationSet, kind: str) -> None:
    change, fault = BROKEN_ZOO[kind]
    path = tmp_path / "k.pt"
    torch.save(change(zoo_content(rotation_set)), path)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert fault in message


class Exploit:
    """Pickles to a call; must never run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploited"),))


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers": Exploit()}, "k.pt")
    assert "not a readable torch file" in refused("k.pt")
    assert not Path("exploited").exists()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 7, 500, 20000])
def test_truncated_file_is_refused(tmp_path: Path, rotation_set: RotationSet, suffix: str, kept: int) -> None:
    path = tmp_path / f"k{suffix}"
    save_rotation_file(path, rotation_set)
    path.write_bytes(path.read_bytes()[:kept])
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert ("is empty" if kept == 0 else "truncated") in message


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.pt").startswith(f"{tmp_path / 'none.pt'}: no such file")
    assert refused(tmp_path).startswith(f"{tmp_path}: is a folder")
    (tmp_path / "k.bin").write_bytes(b"x")
    assert "unknown file type '.bin'" in refused(tmp_path / "k.bin")
    assert "no K rotation given" in refused("")


def test_text_is_refused(tmp_path: Path) -> None:
    for name in ("k.pt", "k.safetensors"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
        assert "not a readable" in refused(tmp_path / name)


def test_safetensors_of_another_kind(tmp_path: Path, rotation_set: RotationSet) -> None:
    path = tmp_path / "k.safetensors"
    save_file({"weight": torch.eye(4)}, path)
    assert "header 'format' is None" in refused(path)
    header = {"format": "oscar-rotation", "format_version": "9"}
    save_file({"rotations": rotation_set.rotations}, path, metadata=header)
    assert "format_version is '9'" in refused(path)
    header["format_version"] = "1"
    save_file({"weight": torch.eye(4)}, path, metadata=header)
    assert "holds tensors ['weight']" in refused(path)
    save_file({"rotations": torch.eye(64)}, path, metadata=header)
    assert "shape [64, 64], expected [layers, head_dim, head_dim]" in refused(path)
    save_file({"rotations": rotation_set.rotations.double()}, path, metadata=header)
    assert "torch.float64" in refused(path)
    save_file({"rotations": rotation_set.rotations}, path, metadata={**header, "calibration": "["})
    assert "header cannot be read" in refused(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["centers", "duals"])
def test_one_number_that_is_none_is_refused(
    name: str, number: float, tmp_path: Path, rotation_set: RotationSet
) -> None:
    rotations = rotation_set.rotations
    tensors = {"centers": torch.zeros(3, 2, 64), "duals": rotations.clone()}
    tensors[name].flatten()[5] = number
    header = {"format": "oscar-rotation", "format_version": "1"}
    save_file({"rotations": rotations, **tensors}, tmp_path / "k.safetensors", metadata=header)
    message = refused(tmp_path / "k.safetensors")
    assert name in message
    assert "finite" in message or "infinite" in message


def test_file_for_another_model_is_refused(tmp_path: Path, rotation_set: RotationSet) -> None:
    path = tmp_path / "k.safetensors"
    save_rotation_file(path, rotation_set)
    assert "holds 3 layers, the model has 36" in refused(path, num_layers=36)
    assert "holds 3 layers, the model has 2" in refused(path, num_layers=2)
    assert "made for head_dim 64, the model has 128" in refused(path, head_dim=128)
    assert "fitted for model some/model" in refused(path, model=ModelIdentity(model_hash="def456"))


@pytest.mark.parametrize(
    ("objective", "name", "side", "usable"),
    [
        ("qqt", "k_rotation_qqt_r_h_pbr.pt", "v", False),
        ("sst_r_h_pbr", "v_rotation_sst_r_h_pbr.pt", "k", False),
        ("ktk", "rotation.pt", "v", False),
        ("qqt", "v_rotation_qqt_r_h_pbr.pt", "v", True),
        ("qqt_sst", "rotation.pt", "v", True),
        ("", "rotation.pt", "k", True),
    ],
)
def test_side_is_recognised_by_the_objective(
    tmp_path: Path, rotation_set: RotationSet, objective: str, name: str, side: Any, usable: bool
) -> None:
    torch.save(zoo_content(rotation_set, objective=objective), tmp_path / name)
    if usable:
        load_rotation(tmp_path / name, num_layers=3, head_dim=64, side=side)
    else:
        assert "are the two paths swapped" in refused(tmp_path / name, side)


def test_what_cannot_be_loaded_is_not_written(tmp_path: Path, rotation_set: RotationSet) -> None:
    broken = dataclasses.replace(rotation_set, rotations=copy.deepcopy(rotation_set.rotations) * 2)
    for suffix in (".pt", ".safetensors", ".bin"):
        with pytest.raises(RotationFileError):
            save_rotation_file(tmp_path / f"k{suffix}", broken)
    assert not list(tmp_path.iterdir())


def test_unknown_side_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="side must be"):
        load_rotation("identity", num_layers=1, head_dim=64, side="q")  # type: ignore[arg-type]
