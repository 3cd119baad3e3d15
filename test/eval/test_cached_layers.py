"""Files of models of which some layers only have an INT2 cache; those of other layers are refused before any server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.model_table import ModelSettings, model_settings
from oscar_tools.calibration.model_files import load_config
from oscar_tools.cli import app
from oscar_tools.evaluation import commands
from oscar_tools.evaluation.methods import make_method
from oscar_tools.evaluation.prove.caches import CacheMaker, Flags
from oscar_tools.evaluation.prove.specs import Spec
from sglang_oscar.formats.cached_layers import cached_layer_ids, cached_layers_of_files
from support import hybrid_models, models

GROUP = 64


def save_model(architecture: str, folder: Path) -> Path:
    return (models if architecture in ("gpt_oss", "qwen3") else hybrid_models).save(architecture, folder)


def save_rotations(folder: Path, layers: tuple[int, ...], head_dim: int) -> Path:
    """Of the recipe plus, for some layers of a model."""
    eye = torch.eye(head_dim).repeat(len(layers), 1, 1)
    ones = (1.0,) * len(layers)
    for side in ("k", "v"):
        facts = RotationMetadata("balanced", side, recipe="plus")  # type: ignore[arg-type]
        made = RotationSet(eye, None, ones, facts, duals=eye.clone(), gains=ones, layer_ids=layers)
        save_rotation_file(folder / f"{side}_rotation_balanced_u_h_br.safetensors", made)
    return folder


def settings_of(model: Path) -> ModelSettings:
    return model_settings(str(model)).overridden(group_size=GROUP)


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5", "gpt_oss", "qwen3"])
def test_layers_are_those_of_the_server(tmp_path: Path, architecture: str) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    model = save_model(architecture, tmp_path / "model")
    config = load_config(settings_of(model))
    layers = cached_layers_of_files(config)
    assert layers == cached_layer_ids(ModelConfig(str(model)))
    assert len(layers) == (config.num_hidden_layers if architecture == "qwen3" else 2)


@pytest.mark.parametrize(
    ("kind", "architecture", "windows"),
    [
        ("olmo3", "Olmo3ForCausalLM", True),
        ("gemma3_text", "Gemma3ForCausalLM", True),
        ("cohere2", "Cohere2ForCausalLM", True),
        ("qwen2", "Qwen2ForCausalLM", False),
    ],
)
def test_windows_are_those_that_a_server_keeps_apart(
    kind: str, architecture: str, windows: bool, tmp_path: Path
) -> None:
    """Also where files call a class otherwise, and where a configuration names windows that SGLang does not see."""
    from sglang.srt.configs.model_config import ModelConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256}
    made = AutoConfig.for_model(kind, architectures=[architecture], num_hidden_layers=4, layer_types=kinds, **sizes)
    made.save_pretrained(tmp_path)
    layers = cached_layers_of_files(load_config(settings_of(tmp_path)))
    assert layers == cached_layer_ids(ModelConfig(str(tmp_path))) == ((1, 3) if windows else (0, 1, 2, 3))


@pytest.mark.parametrize("architecture", ["qwen3_next", "gpt_oss"])
def test_files_for_some_layers_are_taken(tmp_path: Path, architecture: str) -> None:
    settings = settings_of(save_model(architecture, tmp_path / "model"))
    config = load_config(settings)
    rotations = save_rotations(tmp_path / "rotations_plus", cached_layers_of_files(config), config.head_dim)
    make_method("plus", settings, rotations).check(config)
    assert CacheMaker(settings, config, Flags(), 2048).int2(Spec("plus"), rotations).int2


def test_files_of_other_layers_cost_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model("qwen3_next", tmp_path / "model")
    rotations = save_rotations(tmp_path / "rotations_plus", (0, 2), load_config(settings_of(model)).head_dim)
    monkeypatch.setattr(commands, "evaluate", lambda *_: pytest.fail("servers were started"))
    asked = ["eval", str(model), "--group-size", str(GROUP), "--methods", "bf16,plus", "--rot-dir", str(rotations)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1, done.output
    assert "holds layer 0 where the model has 1; use this model's file" in done.stderr
    assert done.stderr.count("\n") == 1
