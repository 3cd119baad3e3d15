"""The .pt schema of the public rotation zoo, read and written.

    {format_version: 1, objective: str, source_grouping: "layer",
     layers: {layer_id: {layer_id, rotation float32 [d, d], eigenvalues float32 [d]}}}
    {format_version: 2, objective: str, source_grouping: "kv_head",
     layers: {layer_id: {layer_id, rotation float32 [kv_heads, d, d], eigenvalues float32 [kv_heads, d]}}}

Version 2 has a rotation per kv head; public files of it are called ``[kv]_rotation_perhead.pt``.
It is read as its authors describe and load it (github.com/FutureMLS-Lab/OSCAR, pull request 20). Their loader tells the
versions by the shape of ``rotation``; here that shape must also be the one that version and grouping state.

Layer keys may be integers or digit strings. Files written here carry one more key, ``metadata`` (strings to
strings), which other readers may ignore.

A file comes from anywhere, so nothing that it states is used before it is bounded: a few bytes can name layer 10^9, a
number of a million digits, or a matrix of any size whose rows all lie in one place.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.atomic import write_atomically
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import MAX_HEAD_DIM, MAX_LAYERS, first_line, numbers, shown
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

GROUPINGS = {1: "layer", 2: "kv_head"}
"""What shares a rotation, by format version."""
_CLIP_KEY = "clip_ratios"
_MAX_DIGITS = 9
"""Of a layer number that is written as text: enough for any layer, few enough to be read as a number."""
SHARED_BYTES = 64 << 20
"""Matrices of several layers may share their numbers in a file (one Hadamard matrix for all); so many bytes may come of
it in memory whatever the size of the file."""


def save_zoo(path: Path, rotation_set: RotationSet) -> None:
    """Write a zoo file atomically.

    Args:
        path: the .pt file.
        rotation_set: what to write; float32 on any device.

    Raises:
        RotationFileError: transforms of the recipe "plus", or of some layers only, which the schema does not hold.
        OSError: if the file cannot be written.
    """
    if not rotation_set.only_rotations:
        raise RotationFileError(
            f"{path}: a .pt file holds rotations for codes of 2 bits, these are of the recipe {rotation_set.recipe} "
            "with more to them; save them as .safetensors"
        )
    if rotation_set.layer_ids is not None:
        raise RotationFileError(f"{path}: a .pt file holds all layers of a model; save these as .safetensors")
    version = 2 if rotation_set.per_head else 1
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
        "format_version": version,
        "objective": rotation_set.metadata.objective,
        "source_grouping": GROUPINGS[version],
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
    _check_records(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip and pickle layers do
        raise _unreadable(path, error) from error
    return _parse(content, path)


def _unreadable(path: Path, error: Exception) -> RotationFileError:
    return RotationFileError(
        f"{path}: not a readable torch file, probably truncated or of another kind "
        f"({type(error).__name__}: {first_line(error)}); copy or fit it again"
    )


def _check_records(path: Path) -> None:
    """Refuse what would unpack to more than the file's size: torch itself never compresses.

    Raises:
        RotationFileError: records that are compressed or share their bytes, or an archive that cannot be listed.
    """
    if not zipfile.is_zipfile(path):
        return  # torch.load says what it is
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(path, error) from error
    if unpacked > path.stat().st_size:
        raise RotationFileError(f"{path}: would unpack to {unpacked} bytes; save it with torch.save, uncompressed")


def _parse(content: Any, path: Path) -> RotationSet:
    if not isinstance(content, dict):
        raise RotationFileError(f"{path}: holds a {type(content).__name__}, not a rotation file (a dict with 'layers')")
    missing = [key for key in ("format_version", "objective", "source_grouping", "layers") if key not in content]
    if missing:
        raise RotationFileError(f"{path}: not a rotation file, missing key{'s' * (len(missing) > 1)} {missing}")
    version = content["format_version"]
    if type(version) is not int or version not in GROUPINGS:
        known = " and ".join(map(str, GROUPINGS))
        raise RotationFileError(
            f"{path}: format_version is {shown(version)}, this release reads {known}; update sglang-oscar"
        )
    grouping = content["source_grouping"]
    if not isinstance(grouping, str) or grouping != GROUPINGS[version]:
        raise RotationFileError(
            f"{path}: source_grouping is {shown(grouping)}, files of format_version {version} have "
            f"{GROUPINGS[version]!r}; fit it again"
        )
    per_head = grouping == "kv_head"
    if not isinstance(content["objective"], str):
        raise RotationFileError(f"{path}: objective is a {type(content['objective']).__name__}, expected a string")
    metadata, clip_ratios = _parse_metadata(content, path)
    entries = _ordered_layers(content["layers"], path)
    rotations = [_tensor(entry, "rotation", layer, path, per_head) for layer, entry in enumerate(entries)]
    stacked = sum(4 * rotation.numel() for rotation in rotations)
    if stacked > max(SHARED_BYTES, path.stat().st_size):
        raise RotationFileError(
            f"{path}: is smaller than the {stacked} bytes of the rotations that it states; fit it again"
        )
    matrices = _stack(rotations, "rotation", path)
    with_eigenvalues = ["eigenvalues" in entry for entry in entries]
    eigenvalues = None
    if any(with_eigenvalues):
        if not all(with_eigenvalues):
            raise RotationFileError(f"{path}: layer {with_eigenvalues.index(False)} has no 'eigenvalues'")
        spectra = [_tensor(entry, "eigenvalues", layer, path, per_head) for layer, entry in enumerate(entries)]
        # Before they are copied: one number can state as many as there are matrices, whose bytes are bounded.
        _check_spectra(spectra, rotations, path)
        eigenvalues = _stack(spectra, "eigenvalues", path)
    return RotationSet(matrices, eigenvalues, clip_ratios, metadata)


def _check_spectra(spectra: list[torch.Tensor], rotations: list[torch.Tensor], path: Path) -> None:
    for layer, (spectrum, rotation) in enumerate(zip(spectra, rotations, strict=True)):
        if spectrum.shape != rotation.shape[:-1]:
            raise RotationFileError(
                f"{path}: 'eigenvalues' of layer {layer} have shape {list(spectrum.shape)}, its rotation "
                f"{list(rotation.shape)}"
            )


def _parse_metadata(content: dict[str, Any], path: Path) -> tuple[RotationMetadata, tuple[float, ...] | None]:
    texts = content.get("metadata", {})
    if not isinstance(texts, dict) or not all(isinstance(x, str) for pair in texts.items() for x in pair):
        raise RotationFileError(f"{path}: 'metadata' must map strings to strings")
    try:
        clip_ratios = numbers(texts[_CLIP_KEY]) if _CLIP_KEY in texts else None
        metadata = RotationMetadata.from_strings({**texts, "objective": content["objective"]})
    except ValueError as error:
        raise RotationFileError(f"{path}: 'metadata' cannot be read ({first_line(error)})") from error
    return metadata, clip_ratios


def _ordered_layers(layers: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(layers, dict) or not layers:
        raise RotationFileError(f"{path}: 'layers' must be a non-empty dict of layer ids")
    by_id: dict[int, dict[str, Any]] = {}
    for key, entry in layers.items():
        layer = _layer_number(key)
        if layer is None:
            raise RotationFileError(f"{path}: layer key {shown(key)} is not a layer number")
        if layer >= MAX_LAYERS:
            raise RotationFileError(f"{path}: layer key {shown(key)} is past any model's layers ({MAX_LAYERS})")
        if layer in by_id:
            raise RotationFileError(f"{path}: layer {layer} occurs twice")
        if not isinstance(entry, dict):
            raise RotationFileError(
                f"{path}: layer {layer} is a {type(entry).__name__}, expected a dict with 'rotation'"
            )
        if "layer_id" in entry and _layer_number(entry["layer_id"]) != layer:
            raise RotationFileError(f"{path}: layer key {layer} holds layer_id {shown(entry['layer_id'])}")
        by_id[layer] = entry
    gap = next((layer for layer in range(len(by_id)) if layer not in by_id), None)
    if gap is not None:
        raise RotationFileError(f"{path}: layer {gap} is missing (layers go up to {max(by_id)}); fit all layers")
    return [by_id[layer] for layer in range(len(by_id))]


def _layer_number(key: Any) -> int | None:
    """The layer that a key names, an integer or digits; None where it is neither."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS:
        return int(key)
    return key if type(key) is int and key >= 0 else None


def _tensor(entry: dict[str, Any], name: str, layer: int, path: Path, per_head: bool) -> torch.Tensor:
    tensor = entry.get(name)
    if not isinstance(tensor, torch.Tensor):
        fault = f"is a {type(tensor).__name__}, expected a tensor" if name in entry else "is missing"
        raise RotationFileError(f"{path}: '{name}' of layer {layer} {fault}")
    if tensor.dtype != torch.float32:
        raise RotationFileError(f"{path}: '{name}' of layer {layer} is {tensor.dtype}, expected torch.float32")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise RotationFileError(f"{path}: '{name}' of layer {layer} is not a plain tensor; save it as one")
    axes = ["kv_heads"] * per_head + ["head_dim"] * (2 if name == "rotation" else 1)
    of_head = tensor.shape[per_head:]
    if tensor.ndim != len(axes) or len(set(of_head)) != 1 or not all(0 < n <= MAX_HEAD_DIM for n in tensor.shape):
        raise RotationFileError(
            f"{path}: '{name}' of layer {layer} has shape {shown(list(tensor.shape))}, expected "
            f"[{', '.join(axes)}], at most {MAX_HEAD_DIM}"
        )
    return tensor.detach()


def _stack(tensors: list[torch.Tensor], name: str, path: Path) -> torch.Tensor:
    for layer, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise RotationFileError(
                f"{path}: '{name}' of layer {layer} has shape {list(tensor.shape)}, layer 0 {list(tensors[0].shape)}"
            )
    return torch.stack(tensors).contiguous()
