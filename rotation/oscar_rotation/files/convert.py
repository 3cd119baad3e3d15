"""From one rotation file format to another, without loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from oscar_rotation.files.rotation_file import read_rotation_file, recorded_side, save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet


def convert(source: Path, target: Path, *, model_id: str | None = None) -> RotationSet:
    """Read, check and write a rotation file; the suffix of ``target`` chooses its format.

    Args:
        source: .pt (public schema) or .safetensors.
        target: .pt or .safetensors. A side that the source's name or objective tells is recorded.
        model_id: recorded as the model the file belongs to, for sources that do not say.

    Returns:
        what was written.

    Raises:
        RotationFileError: a source that cannot be used, or content the target's format cannot hold.
        OSError: if the target cannot be written.
    """
    loaded = read_rotation_file(source)
    side = recorded_side(loaded, source) or {"k_": "k", "v_": "v"}.get(source.name[:2], "")
    metadata = dataclasses.replace(loaded.metadata, side=side, model_id=model_id or loaded.metadata.model_id)
    converted = dataclasses.replace(loaded, metadata=metadata)
    save_rotation_file(target, converted)
    return converted
