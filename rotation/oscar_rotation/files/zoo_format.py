"""The .pt schema of the public rotation zoo, read and written.

    {format_version: 1, objective: str, source_grouping: "layer",
     layers: {layer_id: {layer_id, rotation float32 [d, d], eigenvalues float32 [d]}}}

Layer keys may be integers or digit strings. Files written here carry one more key, ``metadata`` (strings to
strings), which other readers may ignore.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.atomic import write_atomically
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

FORMAT_VERSION = 1
_CLIP_KEY = "clip_ratios"


def save_zoo(path: Path, rotation_set: RotationSet) -> None:
    """Write a zoo file atomically.

    Args:
        path: the .pt file.
        rotation_set: what to write; float32 on any device.

    Raises:
        RotationFileError: one rotation per kv head, or transforms of the recipe "plus": the schema holds neither.
        OSError: if the file cannot be written.
    """
    if rotation_set.per_head:
        raise RotationFileError(
            f"{path}: a .pt file holds one rotation per layer, these are one per kv head; save them as .safetensors"
        )
    if rotation_set.recipe != "paper":
        raise RotationFileError(
            f"{path}: a .pt file holds rotations, these are transforms of the recipe {rotation_set.recipe}; save them "
            "as .safetensors"
        )
    layers: dict[int, dict[str, Any]] = {}
    for layer in range(rotation_set.num_layers):
        # clone: a slice would drag the storage of all layers into the file.
        layers[layer] = {"layer_id": layer, "rotation": rotation_set.rotations[layer].detach().cpu().clone()}
        if rotation_set.eigenvalues is not None:
            layers[layer]["eigenvalues"] = rotation_set.eigenvalues[layer].detach().cpu().clone()
    metadata = rotation_set.metadata.to_strings()
    if rotation_set.clip_ratios is not None:
        metadata[_CLIP_KEY] = json.dumps(list(rotation_set.clip_ratios))
    content = {
        "format_version": FORMAT_VERSION,
        "objective": rotation_set.metadata.objective,
        "source_grouping": "layer",
        "layers": layers,
        "metadata": metadata,
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))


def read_zoo(path: Path) -> RotationSet:
    """Read a zoo file without running code from it (``weights_only``).

    Args:
        path: the .pt file.

    Returns:
        its content; the values are not checked yet (see ``check_rotation_set``).

    Raises:
        RotationFileError: unreadable, corrupt or truncated, or not of the schema above.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip and pickle layers do
        raise RotationFileError(
            f"{path}: not a readable torch file, probably truncated or of another kind "
            f"({type(error).__name__}: {_first_line(error)}); copy or fit it again"
        ) from error
    return _parse(content, path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").strip()[:120]


def _parse(content: Any, path: Path) -> RotationSet:
    if not isinstance(content, dict):
        raise RotationFileError(f"{path}: holds a {type(content).__name__}, not a rotation file (a dict with 'layers')")
    missing = [key for key in ("format_version", "objective", "source_grouping", "layers") if key not in content]
    if missing:
        raise RotationFileError(f"{path}: not a rotation file, missing key{'s' * (len(missing) > 1)} {missing}")
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise RotationFileError(
            f"{path}: format_version is {version!r}, this release reads {FORMAT_VERSION}; update sglang-oscar"
        )
    if content["source_grouping"] != "layer":
        raise RotationFileError(
            f"{path}: source_grouping is {content['source_grouping']!r}, only 'layer' (one per layer) is served"
        )
    if not isinstance(content["objective"], str):
        raise RotationFileError(f"{path}: objective is a {type(content['objective']).__name__}, expected a string")
    metadata, clip_ratios = _parse_metadata(content, path)
    entries = _ordered_layers(content["layers"], path)
    rotations = [_tensor(entry, "rotation", layer, path, 2) for layer, entry in enumerate(entries)]
    with_eigenvalues = ["eigenvalues" in entry for entry in entries]
    eigenvalues = None
    if any(with_eigenvalues):
        if not all(with_eigenvalues):
            raise RotationFileError(f"{path}: layer {with_eigenvalues.index(False)} has no 'eigenvalues'")
        spectra = [_tensor(entry, "eigenvalues", layer, path, 1) for layer, entry in enumerate(entries)]
        eigenvalues = _stack(spectra, "eigenvalues", path)
    return RotationSet(_stack(rotations, "rotation", path), eigenvalues, clip_ratios, metadata)


def _parse_metadata(content: dict[str, Any], path: Path) -> tuple[RotationMetadata, tuple[float, ...] | None]:
    texts = content.get("metadata", {})
    if not isinstance(texts, dict) or not all(isinstance(x, str) for pair in texts.items() for x in pair):
        raise RotationFileError(f"{path}: 'metadata' must map strings to strings")
    try:
        clip_ratios = tuple(float(x) for x in json.loads(texts[_CLIP_KEY])) if _CLIP_KEY in texts else None
        metadata = RotationMetadata.from_strings({**texts, "objective": content["objective"]})
    except (ValueError, TypeError) as error:
        raise RotationFileError(f"{path}: 'metadata' cannot be read ({_first_line(error)})") from error
    return metadata, clip_ratios


def _ordered_layers(layers: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(layers, dict) or not layers:
        raise RotationFileError(f"{path}: 'layers' must be a non-empty dict of layer ids")
    by_id: dict[int, dict[str, Any]] = {}
    for key, entry in layers.items():
        is_id = (isinstance(key, int) and not isinstance(key, bool)) or (
            isinstance(key, str) and key.isascii() and key.isdigit()
        )
        if not is_id or int(key) < 0:
            raise RotationFileError(f"{path}: layer key {key!r} is not a layer number")
        if int(key) in by_id:
            raise RotationFileError(f"{path}: layer {int(key)} occurs twice")
        if not isinstance(entry, dict):
            raise RotationFileError(f"{path}: layer {key} is a {type(entry).__name__}, expected a dict with 'rotation'")
        stated = entry.get("layer_id", int(key))
        if str(stated) != str(int(key)):
            raise RotationFileError(f"{path}: layer key {key} holds layer_id {stated!r}")
        by_id[int(key)] = entry
    gaps = [layer for layer in range(max(by_id)) if layer not in by_id]
    if gaps:
        raise RotationFileError(f"{path}: layer {gaps[0]} is missing (layers go up to {max(by_id)}); fit all layers")
    return [by_id[layer] for layer in range(len(by_id))]


def _tensor(entry: dict[str, Any], name: str, layer: int, path: Path, ndim: int) -> torch.Tensor:
    tensor = entry.get(name)
    if not isinstance(tensor, torch.Tensor):
        fault = f"is a {type(tensor).__name__}, expected a tensor" if name in entry else "is missing"
        raise RotationFileError(f"{path}: '{name}' of layer {layer} {fault}")
    if tensor.dtype != torch.float32:
        raise RotationFileError(f"{path}: '{name}' of layer {layer} is {tensor.dtype}, expected torch.float32")
    if tensor.ndim != ndim or len(set(tensor.shape)) != 1:
        expected = "[head_dim, head_dim]" if ndim == 2 else "[head_dim]"
        shape = list(tensor.shape)
        raise RotationFileError(f"{path}: '{name}' of layer {layer} has shape {shape}, expected {expected}")
    return tensor


def _stack(tensors: list[torch.Tensor], name: str, path: Path) -> torch.Tensor:
    for layer, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise RotationFileError(
                f"{path}: '{name}' of layer {layer} has shape {list(tensor.shape)}, layer 0 {list(tensors[0].shape)}"
            )
    return torch.stack(tensors).contiguous()
