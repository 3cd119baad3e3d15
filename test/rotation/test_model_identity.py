"""A file fitted for another model is refused by id, hash and kv heads; a file that does not say passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity, check_weights, model_name, named_model
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


HASHED = {"model_id": "Qwen/Qwen3-32B", "model_hash": "v2:abc"}


@pytest.mark.parametrize("name", ["/model", "Qwen/Qwen3-32B-FP8", "/data/qwen3-32b/"])
@pytest.mark.parametrize("older", [False, True])
def test_a_name_does_not_count_where_configurations_agree(
    tmp_path: Path, rotation_set: RotationSet, name: str, older: bool
) -> None:
    """Of either version of the hash; another name is warned of where nothing is known of the weights."""
    served = ModelIdentity(name, "v3:def" if older else "v2:abc", 4, ("v2:abc",) if older else ())
    path = saved(tmp_path / "k.safetensors", rotation_set, **HASHED)
    loaded = load_rotation(path, num_layers=3, head_dim=64, side="k", model=served)
    said = check_weights(loaded.metadata, "k.safetensors", served)
    if name == "/data/qwen3-32b/":
        assert said is None
    else:
        assert said is not None
        assert "\n" not in said
        assert f"fitted for Qwen/Qwen3-32B, served is {name}: their configurations agree" in said


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "/model"])
def test_weights_are_told_by_what_they_hold(name: str) -> None:
    """Whatever they are called: equal ones pass without a word, others of their form are refused."""
    metadata = RotationMetadata(**HASHED, calibration={"weights_digest": "form:old"})

    def said(weights: str) -> str | None:
        return check_weights(metadata, "k.safetensors", ModelIdentity(name, "v2:abc", 4, weights=weights))

    assert said("form:old") is None
    with pytest.raises(RotationFileError, match=r"k\.safetensors: fitted to other weights \(Qwen/Qwen3-32B\)") as error:
        said("form:new")
    assert "SGLANG_OSCAR_ALLOW_OTHER_MODEL=1" in str(error.value)
    assert "could not be compared" in (said("quantized:new") or "")
    assert (said("") is None) == (name != "/model")
    for nonsense in (3, None, [], ""):
        odd = RotationMetadata(**HASHED, calibration={"weights_digest": nonsense})
        assert (check_weights(odd, "k", ModelIdentity(name, "v2:abc", 4, weights="f:c")) is None) == (name != "/model")


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
