"""Which model a server serves: what dumps record and what rotation files are compared with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from oscar_rotation.files.identity import ModelIdentity, named_model
from oscar_rotation.math.rope import base_of

FIELDS = (
    "architectures", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
"""What makes two configurations different models, besides what :func:`config_hash` adds. Dtypes, quantization and
context extension do not: a quantized copy may be served with rotations of the original."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of one field."""

FIRST_FIELDS = (*FIELDS[:4], "num_experts", *FIELDS[4:7], "head_dim", FIELDS[7])
"""Of the first version of the hash, which files of older releases state."""


def config_hash(config: dict[str, Any]) -> str:
    """Version 2 of the hash of what makes a configuration another model; absent fields count as None.

    Besides :data:`FIELDS`: experts by any of their names, channels per head, which layers attend to everything, and how
    fast and how much of a head turns with the position, before any scaling.

    >>> config_hash({"hidden_size": 64, "torch_dtype": "float16"}) == config_hash({"hidden_size": 64})
    True
    >>> config_hash({"num_experts": 8}) == config_hash({"num_local_experts": 8})
    True
    >>> config_hash({"rope_theta": 1e4}) == config_hash({"rope_theta": 1e6})
    False
    """
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (width // heads if heads and width else None)
    facts = {
        **{name: config.get(name) for name in FIELDS},
        "experts": next((config[name] for name in EXPERTS if config.get(name) is not None), None),
        "head_dim": head_dim,
        "other_layers": [n for n, kind in enumerate(config.get("layer_types") or ()) if kind != "full_attention"],
        "rope": base_of(config, head_dim or 0),
    }
    return "v2:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def configuration(config: Any) -> dict[str, Any]:
    """All that a configuration of transformers says of a model, but for the path that it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def digest(facts: dict[str, Any]) -> str:
    """SHA-256, in hex, of facts in any order; what JSON does not know counts as its text."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def first_hash(config: dict[str, Any]) -> str:
    """Version 1 of the hash: SHA-256 of :data:`FIRST_FIELDS`."""
    return hashlib.sha256(json.dumps([config.get(name) for name in FIRST_FIELDS]).encode()).hexdigest()


def model_identity(model_path: str, model_config: Any) -> ModelIdentity:
    """A model by SGLang's configuration of it, under the path that the user gave, not where a download put it."""
    config = model_config.hf_text_config.to_dict()
    return ModelIdentity(
        model_id=named_model(model_path),
        model_hash=config_hash(config),
        kv_heads=model_config.get_total_num_kv_heads(),
        older_hashes=(first_hash(config),),
    )


def weights_place(model_path: str) -> str:
    """Where a later fit finds the weights, whatever folder it runs in: a hub id as it is, a folder in full."""
    return str(Path(model_path).resolve()) if Path(model_path).is_dir() else model_path
