"""Rotation files: the one place where the server, the fit and the inspector read and write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity, check_identity
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side, check_rotation_set
from oscar_rotation.files.safetensors_format import read_safetensors, save_safetensors
from oscar_rotation.files.zoo_format import read_zoo, save_zoo
from oscar_rotation.math.compose import DEFAULT_COMPOSITION, RECIPES

__all__ = [
    "RotationFileError",
    "RotationMetadata",
    "RotationSet",
    "load_rotation",
    "read_rotation_file",
    "recipe_rotation",
    "rotation_file_name",
    "save_rotation_file",
]

SUFFIXES = {".pt": (read_zoo, save_zoo), ".safetensors": (read_safetensors, save_safetensors)}
_SIDES_OF_TARGET = {"qqt": "k", "ktk": "k", "sst": "v", "vtv": "v", "proxy": "v"}
"""Targets that one side only can have, for files that do not state their side."""


def rotation_file_name(side: Side, target: str, composition: str = DEFAULT_COMPOSITION, suffix: str = ".pt") -> str:
    """File name in the zoo's form.

    >>> rotation_file_name("k", "qqt"), rotation_file_name("v", "sst")
    ('k_rotation_qqt_r_h_pbr.pt', 'v_rotation_sst_r_h_pbr.pt')
    """
    return f"{side}_rotation_{target}_{composition}{suffix}"


def load_rotation(
    path_or_recipe: str | Path,
    *,
    num_layers: int,
    head_dim: int,
    side: Side,
    model: ModelIdentity | None = None,
    allow_other_model: bool = False,
) -> RotationSet:
    """Rotations for serving one model: read, checked in full, never replaced by a fallback.

    Args:
        path_or_recipe: a .pt file in the public schema, a .safetensors file, or the name of a data-free recipe:
            "identity" or "hadamard". A file of such a name is reached as "./identity".
        num_layers: attention layers of the model.
        head_dim: channels per head of the model.
        side: "k" or "v": which cache the rotation is for.
        model: the served model; a file that states another one is refused. None skips this check.
        allow_other_model: skip it too. Layer count and head_dim must fit in any case.

    Returns:
        RotationSet: ``rotations`` float32 [num_layers, head_dim, head_dim] on the CPU, or [num_layers, kv_heads,
        head_dim, head_dim] where every kv head has its own; ``eigenvalues`` float32 [num_layers, head_dim] or None,
        ``clip_ratios`` one per layer or None, ``metadata``.

    Raises:
        RotationFileError: one line that names the file, the fault and the remedy: a missing or unreadable file, a
            wrong schema or version, layers missing or too many, a wrong shape or dtype, NaN or infinite entries,
            not orthogonal, a file for the other side or for another model.
    """
    if side not in get_args(Side):
        raise ValueError(f"side must be 'k' or 'v', got {side!r}")
    if isinstance(path_or_recipe, str) and path_or_recipe in RECIPES:
        return recipe_rotation(path_or_recipe, num_layers=num_layers, head_dim=head_dim, side=side)
    if not str(path_or_recipe):
        raise RotationFileError(f"no {side.upper()} rotation given; name a file or a recipe: {', '.join(RECIPES)}")
    path = Path(path_or_recipe)
    loaded = read_rotation_file(path)
    _check_side(loaded, path, side)
    if loaded.head_dim != head_dim:
        raise RotationFileError(
            f"{path}: made for head_dim {loaded.head_dim}, the model has {head_dim}; use this model's file"
        )
    if loaded.num_layers != num_layers:
        raise RotationFileError(
            f"{path}: holds {loaded.num_layers} layers, the model has {num_layers}; use this model's file"
        )
    if model is not None and not allow_other_model:
        check_identity(loaded, path, model)
    return loaded


def recipe_rotation(name: str, *, num_layers: int, head_dim: int, side: Side) -> RotationSet:
    """The data-free recipe ``name``, the same matrix in every layer.

    Args:
        name: "identity" (naive INT2) or "hadamard" (QuaRot).
        num_layers, head_dim: size of the result.
        side: recorded in the metadata.

    Returns:
        RotationSet without eigenvalues and clip ratios.

    Raises:
        RotationFileError: unknown name, or head_dim not a power of two for "hadamard".
    """
    if name not in RECIPES:
        raise RotationFileError(f"unknown rotation recipe {name!r}; known are {', '.join(RECIPES)}")
    try:
        matrix = RECIPES[name](head_dim).float()
    except ValueError as error:
        raise RotationFileError(f"rotation recipe {name!r}: {error}") from error
    rotations = matrix.expand(num_layers, -1, -1).contiguous()
    return RotationSet(rotations, metadata=RotationMetadata(objective=name, side=side))


def read_rotation_file(path: str | Path) -> RotationSet:
    """Read and check a rotation file on its own, knowing nothing of a model.

    Args:
        path: .pt (public schema) or .safetensors.

    Returns:
        RotationSet on the CPU.

    Raises:
        RotationFileError: as :func:`load_rotation`, less the checks against a model.
    """
    path = Path(path)
    known = f"name a rotation file or a recipe: {', '.join(RECIPES)}"
    if not path.exists():
        raise RotationFileError(f"{path}: no such file; {known}")
    if path.is_dir():
        raise RotationFileError(f"{path}: is a folder; {known}")
    if path.suffix not in SUFFIXES:
        raise RotationFileError(f"{path}: unknown file type {path.suffix!r}, expected {' or '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise RotationFileError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if empty:
        raise RotationFileError(f"{path}: is empty; copy or fit it again")
    read, _ = SUFFIXES[path.suffix]
    loaded = read(path)
    check_rotation_set(loaded, str(path))
    return loaded


def save_rotation_file(path: str | Path, rotation_set: RotationSet) -> None:
    """Check and write a rotation file; it appears whole or not at all.

    Args:
        path: .pt (public schema) or .safetensors (preferred: safe to load, fast, with all metadata).
        rotation_set: what to write.

    Raises:
        RotationFileError: unknown suffix, or content that :func:`read_rotation_file` would refuse.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise RotationFileError(f"{path}: unknown file type {path.suffix!r}, expected {' or '.join(SUFFIXES)}")
    check_rotation_set(rotation_set, str(path))
    _, write = SUFFIXES[path.suffix]
    write(path, rotation_set)


def recorded_side(loaded: RotationSet, path: Path) -> str:
    """Which cache a file was made for: "k", "v" or "" where it cannot be told.

    The public schema has no such field, so the objective's words decide. "qqt" also names value files of the
    first public release, whose names begin with "v_": there the file name decides.
    """
    if loaded.metadata.side:
        return loaded.metadata.side
    words = set(re.split(r"[^a-z]+", loaded.metadata.objective.lower()))
    sides = {side for target, side in _SIDES_OF_TARGET.items() if target in words}
    if len(sides) != 1:
        return ""
    if sides == {"k"} and path.name.startswith("v_"):
        return ""
    return sides.pop()


def _check_side(loaded: RotationSet, path: Path, side: Side) -> None:
    recorded = recorded_side(loaded, path)
    if recorded and recorded != side:
        raise RotationFileError(
            f"{path}: is a {recorded.upper()} rotation (objective {loaded.metadata.objective!r}), "
            f"given as the {side.upper()} rotation; are the two paths swapped?"
        )
