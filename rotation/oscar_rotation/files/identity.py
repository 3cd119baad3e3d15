"""Which model a rotation file belongs to, as far as it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import shown
from oscar_rotation.files.rotation_set import RotationSet

_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/[^/]+/?$")


@dataclass(frozen=True)
class ModelIdentity:
    """What is known of a served model; empty or None where unknown.

    Attributes:
        model_id: hub id or path.
        model_hash: hash of its configuration.
        kv_heads: kv heads of the whole model.
    """

    model_id: str = ""
    model_hash: str = ""
    kv_heads: int | None = None


def named_model(model: str) -> str:
    """A model as it is called anywhere: of a folder that is given relative to another, such as ``.``, its path."""
    return str(Path(model).resolve()) if model and Path(model).name in ("", "..") else model


def model_name(model_id: str) -> str:
    """The part of an id that names the model, wherever it is stored.

    >>> model_name("Qwen/Qwen3-8B"), model_name("/data/Qwen3-8B/")
    ('qwen3-8b', 'qwen3-8b')
    >>> model_name("/hf/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46")
    'qwen3-8b'
    """
    snapshot = _SNAPSHOT.search(model_id)
    text = snapshot["id"].replace("--", "/") if snapshot else model_id
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1].lower()


def check_identity(loaded: RotationSet, path: Path, model: ModelIdentity) -> None:
    """Refuse a file that says it was fitted for another model.

    A file that does not say, such as one of the public zoo, passes: only what both sides state is compared.

    Raises:
        RotationFileError: another number of kv heads, another id, or another configuration hash.
    """
    facts = loaded.metadata
    remedy = "use this model's file, or set SGLANG_OSCAR_ALLOW_OTHER_MODEL=1"
    recorded = facts.calibration.get("kv_heads")
    if recorded and model.kv_heads and recorded != model.kv_heads:
        raise RotationFileError(
            f"{path}: fitted with {shown(recorded)} kv heads, the model has {model.kv_heads}; {remedy}"
        )
    if facts.model_hash and model.model_hash and facts.model_hash != model.model_hash:
        raise RotationFileError(
            f"{path}: fitted for model {facts.model_id or 'unknown'} (configuration hash {facts.model_hash[:12]}), "
            f"the served model has hash {model.model_hash[:12]}; {remedy}"
        )
    if facts.model_id and model.model_id and model_name(facts.model_id) != model_name(model.model_id):
        raise RotationFileError(f"{path}: fitted for {facts.model_id}, not for {model.model_id}; {remedy}")
