"""Which model a server serves: what dumps record and what rotation files are compared with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from oscar_rotation.files.identity import ModelIdentity, named_model

FIELDS = (
    "architectures", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""What makes two configurations different models. Dtypes, quantization and context extension do not: a quantized copy
may be served with rotations of the original."""


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of the fields of a model's configuration that make it another model; absent ones count as None.

    >>> config_hash({"hidden_size": 64, "torch_dtype": "float16"}) == config_hash({"hidden_size": 64})
    True
    >>> config_hash({"hidden_size": 64}) == config_hash({"hidden_size": 128})
    False
    """
    return hashlib.sha256(json.dumps([config.get(name) for name in FIELDS]).encode()).hexdigest()


def model_identity(model_path: str, model_config: Any) -> ModelIdentity:
    """A model by SGLang's configuration of it, under the path that the user gave, not where a download put it."""
    return ModelIdentity(
        model_id=named_model(model_path),
        model_hash=config_hash(model_config.hf_text_config.to_dict()),
        kv_heads=model_config.get_total_num_kv_heads(),
    )
