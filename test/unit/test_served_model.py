"""What makes two models different to a rotation file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sglang_oscar.formats.model_identity import FIELDS, config_hash, first_hash

MODEL = Path(__file__).parents[2] / "models" / "reference"


def read(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as SGLang reads it, after changes to the file."""
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder).to_dict()


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"])
def test_another_shape_is_another_model(tmp_path: Path, field: str) -> None:
    plain = read(tmp_path)
    assert config_hash(read(tmp_path, **{field: 2 * plain[field]})) != config_hash(plain)


def test_quantized_and_extended_copies_are_the_same_model(tmp_path: Path) -> None:
    copy = read(tmp_path, torch_dtype="float16", max_position_embeddings=1 << 20, _name_or_path="elsewhere")
    copy |= {"quantization_config": {"quant_method": "fp8"}, "transformers_version": "0"}
    assert config_hash(copy) == config_hash(read(tmp_path))


GOLDEN = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 150000.0,
}  # fmt: skip


def test_hashes_of_files_that_exist_already() -> None:
    """Both versions, for good: files of older releases state the first, files of this one the second."""
    assert first_hash(GOLDEN) == "19f38172bbdd47cb5415ff06ed2d1f92886a43b9aa679492d045e9fb36ac5d45"
    assert config_hash(GOLDEN) == "v2:e540e278d524ca2cc2346a3ba8da255ba5f2907f98bca6e4acc52f7005e4832c"


@pytest.mark.parametrize(
    "change",
    [
        {"num_local_experts": 8}, {"rope_theta": 1e6}, {"partial_rotary_factor": 0.5}, {"head_dim": 32},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)  # fmt: skip
def test_what_makes_a_rotation_wrong_is_another_model(change: dict[str, Any]) -> None:
    assert config_hash(GOLDEN | change) != config_hash(GOLDEN)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 16}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "rope_theta": None},
    ],
)  # fmt: skip
def test_the_same_in_other_words_is_the_same_model(change: dict[str, Any]) -> None:
    assert config_hash(GOLDEN | change) == config_hash(GOLDEN)


def test_hash_does_not_depend_on_the_order_of_fields() -> None:
    config = {name: number for number, name in enumerate(FIELDS)}
    assert config_hash(config) == config_hash(dict(reversed(config.items())))


def test_a_base_by_layer_tells_models_apart() -> None:
    """Step 3.5 states the base of its frequencies for every layer."""
    one, other = ({"head_dim": 64, "rope_theta": [1e6, 1e4, theta]} for theta in (1e6, 5e6))
    assert config_hash(one) != config_hash(other)
    assert config_hash(one) == config_hash(one | {"torch_dtype": "float16"})
