"""Rotation files as safetensors: all layers in one tensor, provenance in the header.

Tensors ``rotations`` float32 [layers, d, d] and optionally ``eigenvalues`` float32 [layers, d], ``duals`` float32
[layers, d, d] and ``centers`` float32 [layers, kv_heads, d] (see ``RotationSet``). Header strings:
``format`` = "oscar-rotation", ``format_version`` = "1", the fields of ``RotationMetadata``, and ``clip_ratios`` and
``gains`` (JSON lists, one number per layer). Files of format version "2" have ``bits``, another such list: whoever does
not know it must not read them as codes of two bits. Those of version "3" have ``codings``, a JSON list of strings,
perhaps ``bits``, and, where a layer is coded by a codebook, tensors ``codebook_points`` int8 [layers, kv_heads, d / 4,
256, 4] and ``codebook_factors`` float32 [layers, kv_heads, d / 4], zeros in other layers. In version "4" a layer may
have a list by kv head in place of a number or a string, and zeros for a head without a codebook. ``layer_ids``, one
more list of numbers, says which layers of the model these are where they are not all: whoever does not know it sees a
file of too few layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oscar_rotation.atomic import write_atomically
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import MAX_HEAD_DIM, MAX_LAYERS, first_line, numbers, shown, strings
from oscar_rotation.files.by_head import flat
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

FORMAT = "oscar-rotation"
FORMAT_VERSIONS = ("1", "2", "3", "4")
_OPTIONAL = ("eigenvalues", "duals", "centers")
_BOOKS = ("codebook_points", "codebook_factors")
_PER_LAYER = ("clip_ratios", "gains")
_BITS = "bits"
_CODINGS = "codings"
_LAYER_IDS = "layer_ids"


def save_safetensors(path: Path, rotation_set: RotationSet) -> None:
    """Write a safetensors rotation file atomically.

    Args:
        path: the .safetensors file.
        rotation_set: what to write; float32 on any device.

    Raises:
        OSError: if the file cannot be written.
    """
    tensors = {"rotations": rotation_set.rotations.detach().cpu().contiguous()}
    for name in _OPTIONAL:
        tensor = getattr(rotation_set, name)
        if tensor is not None:
            tensors[name] = tensor.detach().cpu().contiguous()
    if (books := rotation_set.codebooks) is not None:
        tensors |= dict(zip(_BOOKS, (books.points.cpu().contiguous(), books.factors.cpu().contiguous()), strict=True))
    header = {
        "format": FORMAT,
        "format_version": _version(rotation_set),
        **rotation_set.metadata.to_strings(),
    }
    for name in _PER_LAYER:
        numbers = getattr(rotation_set, name)
        if numbers is not None:
            header[name] = json.dumps(list(numbers))
    if rotation_set.bits is not None:
        header[_BITS] = json.dumps(list(rotation_set.bits))
    if rotation_set.codings is not None:
        header[_CODINGS] = json.dumps(list(rotation_set.codings))
    if rotation_set.layer_ids is not None:
        header[_LAYER_IDS] = json.dumps(list(rotation_set.layer_ids))

    def fill(temporary: Path) -> None:
        # save_file would make the file private to its owner; bytes follow the umask like any other file.
        temporary.write_bytes(save(tensors, metadata=header))

    write_atomically(path, fill)


def _version(rotation_set: RotationSet) -> str:
    """The oldest that has all of it."""
    newer = (rotation_set.bits is not None, rotation_set.codings is not None, rotation_set.coded_heads is not None)
    return FORMAT_VERSIONS[max(number for number, needed in enumerate((True, *newer)) if needed)]


def read_safetensors(path: Path) -> RotationSet:
    """Read a safetensors rotation file.

    Args:
        path: the .safetensors file.

    Returns:
        its content; the values are not checked yet (see ``check_rotation_set``).

    Raises:
        RotationFileError: unreadable, corrupt or truncated, or not of the form above.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
            version = _check_header(header, shapes, path)
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise RotationFileError(
            f"{path}: not a readable safetensors file, probably truncated ({first_line(error)}); copy or fit it again"
        ) from error
    try:
        metadata = RotationMetadata.from_strings(header)
        by_head = version == FORMAT_VERSIONS[3]
        per_layer = {name: numbers(header[name], by_head) for name in _PER_LAYER if name in header}
        with_bits = version == FORMAT_VERSIONS[1] or (version in FORMAT_VERSIONS[2:] and _BITS in header)
        bits = _whole(numbers(header.get(_BITS, ""), by_head)) if with_bits else None
        with_codings = version == FORMAT_VERSIONS[2] or (by_head and _CODINGS in header)
        codings = strings(header.get(_CODINGS, ""), by_head) if with_codings else None
        layer_ids = _whole(numbers(header[_LAYER_IDS])) if _LAYER_IDS in header else None
    except ValueError as error:
        raise RotationFileError(f"{path}: the header cannot be read ({first_line(error)})") from error
    optional: dict[str, Any] = {name: tensors.get(name) for name in _OPTIONAL} | per_layer
    if _BOOKS[0] in tensors:
        optional["codebooks"] = Codebooks(*(tensors[name] for name in _BOOKS))
    return RotationSet(
        tensors["rotations"], metadata=metadata, bits=bits, layer_ids=layer_ids, codings=codings, **optional
    )


def _whole(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same as integers.

    Raises:
        ValueError: one is none.
    """
    if not all(number.is_integer() for number in flat(numbers)):
        raise ValueError("bits and layer ids are whole numbers")
    return tuple(tuple(map(int, number)) if isinstance(number, tuple) else int(number) for number in numbers)


def _check_header(header: dict[str, str], shapes: dict[str, list[int]], path: Path) -> str:
    """Refuse a file of another kind, or shapes that no model has, before a tensor is read; returns its version.

    Raises:
        RotationFileError: as :func:`read_safetensors`.
    """
    if header.get("format") != FORMAT:
        raise RotationFileError(
            f"{path}: not a rotation file, header 'format' is {shown(header.get('format'))}, expected {FORMAT!r}"
        )
    version = header.get("format_version")
    if version not in FORMAT_VERSIONS:
        known = ", ".join(map(repr, FORMAT_VERSIONS))
        raise RotationFileError(
            f"{path}: format_version is {shown(version)}, this release reads {known}; update sglang-oscar"
        )
    books = _BOOKS if version in FORMAT_VERSIONS[2:] else ()
    alone = len(shapes.keys() & set(books)) == 1
    if "rotations" not in shapes or set(shapes) - {"rotations", *_OPTIONAL, *books} or alone:
        expected = f"'rotations' and perhaps {', '.join((*_OPTIONAL, *books))}"
        found = (
            f"{sorted(shapes)}" if len(shapes) <= 4 and all(len(name) <= 60 for name in shapes) else f"{len(shapes)}"
        )
        raise RotationFileError(f"{path}: holds tensors {found}, expected {expected}")
    for name, shape in shapes.items():
        large = max(shape[:1], default=0) > MAX_LAYERS or max(shape[1:], default=0) > MAX_HEAD_DIM
        if large or len(shape) > 4 + (name in books):
            raise RotationFileError(
                f"{path}: {name} have shape {shown(shape)}; at most {MAX_LAYERS} layers and head_dim {MAX_HEAD_DIM}"
            )
    return version
