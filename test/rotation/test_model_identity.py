"""A file fitted for another model is refused by id, hash and kv heads; a file that does not say passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity, model_name, named_model
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.load import load_rotation


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/data/models/Qwen3-8B/", "qwen3-8b"),
        ("models/reference", "reference"),
        ("/hf/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218", "qwen3-8b"),
    ],
)
def test_names_do_not_depend_on_where_a_model_is(model_id: str, name: str) -> None:
    assert model_name(model_id) == name


def saved(path: Path, rotations: RotationSet, **facts: object) -> Path:
    metadata = RotationMetadata(objective="qqt", side="k", **facts)  # type: ignore[arg-type]
    save_rotation_file(path, dataclasses.replace(rotations, metadata=metadata))
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"model_id": "a/other"}, "fitted for a/other, not for /models/served"),
        ({"model_hash": "123"}, r"configuration hash 123\), the served model has hash abc"),
        ({"calibration": {"kv_heads": 8}}, "fitted with 8 kv heads, the model has 4"),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, rotation_set: RotationSet, suffix: str, facts: dict[str, object], fault: str
) -> None:
    path = saved(tmp_path / f"k{suffix}", rotation_set, **facts)
    served = ModelIdentity("/models/served", "abc", 4)
    with pytest.raises(RotationFileError, match=fault) as refusal:
        load_rotation(path, num_layers=3, head_dim=64, side="k", model=served)
    assert str(path) in str(refusal.value)
    assert "SGLANG_OSCAR_ALLOW_OTHER_MODEL=1" in str(refusal.value)
    load_rotation(path, num_layers=3, head_dim=64, side="k")


def test_files_of_this_model_and_files_that_do_not_say_pass(tmp_path: Path, rotation_set: RotationSet) -> None:
    served = ModelIdentity("/models/served", "abc", 4)
    facts = {"model_id": "org/Served", "model_hash": "abc", "calibration": {"kv_heads": 4}}
    for number, stated in enumerate((facts, {})):
        path = saved(tmp_path / f"{number}.pt", rotation_set, **stated)
        load_rotation(path, num_layers=3, head_dim=64, side="k", model=served)


def test_geometry_has_no_override(tmp_path: Path, rotation_set: RotationSet) -> None:
    path = saved(tmp_path / "k.pt", rotation_set)
    for layers, head_dim, fault in ((4, 64, "holds 3 layers"), (3, 128, "made for head_dim 64")):
        with pytest.raises(RotationFileError, match=fault):
            load_rotation(path, num_layers=layers, head_dim=head_dim, side="k")


def test_a_folder_given_relative_to_another_is_called_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some-model" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "some-model")
    assert [model_name(named_model(name)) for name in (".", "./", "below/..")] == ["some-model"] * 3
    assert [named_model(name) for name in ("Qwen/Qwen3-8B", "below", "")] == ["Qwen/Qwen3-8B", "below", ""]
