"""What makes two models different to a rotation file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sglang_oscar.weights.model_identity import FIELDS, config_hash

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


def test_hash_does_not_depend_on_the_order_of_fields() -> None:
    config = {name: number for number, name in enumerate(FIELDS)}
    assert config_hash(config) == config_hash(dict(reversed(config.items())))
