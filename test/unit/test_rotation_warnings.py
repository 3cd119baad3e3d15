"""A server that takes positions its keys were not fitted for says so in one line; others say nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from oscar_rotation.files.identity import ModelIdentity
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.warnings import rotation_warnings, weights_warning
from sglang_oscar.settings import Settings

PLAIN = {"rope_type": "default", "rope_theta": 1e6, "rotary_dim": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def served(context: int, **rope: Any) -> Any:
    """A model as SGLang's ModelConfig has it."""
    scaling = {"rope_scaling": {**rope, "rope_theta": 1e6}} if rope else {}
    config = AutoConfig.for_model("qwen2", rope_theta=1e6, head_dim=128, **scaling)
    return SimpleNamespace(hf_text_config=config, head_dim=128, context_len=context)


def warnings(folder: Path, model: Any, recipe: str = "plus", **calibration: Any) -> list[str]:
    path = folder / "k.safetensors"
    metadata = RotationMetadata(side="k", recipe=recipe, calibration=calibration)
    save_rotation_file(path, RotationSet(torch.eye(128)[None], metadata=metadata))
    settings = Settings.from_env(
        {"SGLANG_OSCAR_K_ROTATION_PATH": str(path), "SGLANG_OSCAR_V_ROTATION_PATH": "identity"}
    )
    return rotation_warnings(settings, model, ModelIdentity(), {})


def test_a_longer_context(tmp_path: Path) -> None:
    (line,) = warnings(tmp_path, served(131072), context=32768, rope=PLAIN)
    assert "\n" not in line
    for part in ("k.safetensors is fitted for 32,768 positions", "131,072 tokens", "oscar fit --context 131072"):
        assert part in line
    assert "--context-length 32768" in line


def test_another_embedding(tmp_path: Path) -> None:
    """Though the context fits: what was fitted are keys that turn otherwise."""
    (line,) = warnings(tmp_path, served(131072, **YARN), context=131072, rope=PLAIN)
    assert "whose embedding is yarn, rope_theta 1e+06, factor 4" in line
    assert "--json-model-override-args" in line
    assert warnings(tmp_path, served(131072), context=131072, rope=PLAIN | {"rope_theta": 5e6})


def test_positions_of_the_dump_alone(tmp_path: Path) -> None:
    (line,) = warnings(tmp_path, served(32768), context=1024, rope={})
    assert "1,024 positions of its dump alone" in line
    assert "--context 0" in line


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (served(32768), {"context": 32768, "rope": PLAIN}),
        (served(4096), {"context": 32768, "rope": PLAIN}),
        (served(131072, **YARN), {"context": 131072, "rope": PLAIN | YARN}),
        (served(131072, **YARN), {"context": 131072, "rope": PLAIN | YARN | {"beta_fast": 32.0}}),
        (served(131072), {"recipe": "paper"}),
        (served(131072), {"context": 0}),
        (served(131072), {"context": "far", "rope": [1]}),
    ],
    ids=["fits", "shorter", "YaRN", "defaults stated", "paper", "older release", "nonsense"],
)
def test_nothing_to_say(tmp_path: Path, model: Any, facts: dict[str, Any]) -> None:
    assert warnings(tmp_path, model, **facts) == []


def test_files_of_older_releases_state_their_context_alone(tmp_path: Path) -> None:
    assert warnings(tmp_path, served(32768), context=32768) == []
    assert len(warnings(tmp_path, served(131072, **YARN), context=32768)) == 1


def test_an_embedding_that_makes_no_sense_is_another_one(tmp_path: Path) -> None:
    for facts in ({"rope_theta": "x"}, {"rope_theta": -1.0}, {"rope_type": 3}, {"rotary_dim": 1 << 60}):
        assert len(warnings(tmp_path, served(1024), context=1024, rope=PLAIN | facts)) == 1


def test_built_in_recipes_know_no_positions() -> None:
    settings = Settings.from_env({f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"})
    assert rotation_warnings(settings, served(1 << 20), ModelIdentity(), {}) == []


def test_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    """Of the keys or of the values: refused, unless the user knows better."""
    paths = {}
    for side, weights in (("k", "form:mine"), ("v", "form:other")):
        metadata = RotationMetadata(side=side, recipe="plus", calibration={"weights_digest": weights})
        path = tmp_path / f"{side}.safetensors"
        save_rotation_file(path, RotationSet(torch.eye(128)[None], metadata=metadata))
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(path)
    mine = ModelIdentity("some/model", weights="form:mine")
    with pytest.raises(Int2Error, match=r"v\.safetensors: fitted to other weights"):
        weights_warning(Settings.from_env(paths), mine)
    assert weights_warning(Settings.from_env(paths | {"SGLANG_OSCAR_ALLOW_OTHER_MODEL": "1"}), mine) is None
    assert "could not be compared" in (weights_warning(Settings.from_env(paths), replace(mine, weights="fp8:x")) or "")
