"""Which model a rotation file belongs to, as far as it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import shown
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

REMEDY = "use this model's file, or set SGLANG_OSCAR_ALLOW_OTHER_MODEL=1"

WEIGHTS = "weights_digest"
"""Field of a file's calibration: :attr:`ModelIdentity.weights` of the model that was dumped."""

_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/[^/]+/?$")


@dataclass(frozen=True)
class ModelIdentity:
    """What is known of a served model; empty or None where unknown.

    Attributes:
        model_id: hub id or path.
        model_hash: hash of its configuration.
        kv_heads: kv heads of the whole model.
        older_hashes: the same by which older releases called it.
        weights: digests of the form and of the content of its attention weights, ``FORM:CONTENT``.
    """

    model_id: str = ""
    model_hash: str = ""
    kv_heads: int | None = None
    older_hashes: tuple[str, ...] = ()
    weights: str = ""


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

    A file that does not say, such as one of the public zoo, passes: only what both sides state is compared. Where the
    configurations agree, the name does not count: containers mount models as ``/model``, copies are called otherwise.

    Raises:
        RotationFileError: another number of kv heads, another configuration hash, or without one another name.
    """
    facts = loaded.metadata
    recorded = facts.calibration.get("kv_heads")
    if recorded and model.kv_heads and recorded != model.kv_heads:
        raise RotationFileError(
            f"{path}: fitted with {shown(recorded)} kv heads, the model has {model.kv_heads}; {REMEDY}"
        )
    hashes = (model.model_hash, *model.older_hashes)
    if facts.model_hash and model.model_hash:
        if facts.model_hash not in hashes:
            raise RotationFileError(
                f"{path}: fitted for model {facts.model_id or 'unknown'} (configuration hash {facts.model_hash[:12]}), "
                f"the served model has hash {model.model_hash[:12]}; {REMEDY}"
            )
    elif _other_name(facts, model):
        raise RotationFileError(f"{path}: fitted for {facts.model_id}, not for {model.model_id}; {REMEDY}")


def check_weights(facts: RotationMetadata, source: str, model: ModelIdentity) -> str | None:
    """Refuse a file of :func:`check_identity` that was fitted to other weights of the same shape.

    Args:
        facts: of the file.
        source: the file, for the message.
        model: that is served.

    Returns:
        a warning, one line, where it cannot be known: the file or the model does not say, or a copy is quantized.

    Raises:
        RotationFileError: the weights have one form, and their contents differ.
    """
    found = facts.calibration.get(WEIGHTS)
    stated = found if isinstance(found, str) else ""
    both = bool(stated and model.weights)
    if both and stated == model.weights:
        return None
    if both and stated.split(":")[0] == model.weights.split(":")[0]:
        raise RotationFileError(
            f"{source}: fitted to other weights ({facts.model_id or 'unknown'}) than those of {model.model_id}, though "
            f"their configurations agree; {REMEDY}"
        )
    if both or _other_name(facts, model):
        return (
            f"{source} is fitted for {facts.model_id or 'unknown'}, served is {model.model_id}: their configurations "
            "agree, their weights could not be compared; for a copy of one model (quantized, or of another name) that "
            "is fine, other weights need a file of their own"
        )
    return None


def _other_name(facts: RotationMetadata, model: ModelIdentity) -> bool:
    return bool(facts.model_id and model.model_id) and model_name(facts.model_id) != model_name(model.model_id)
