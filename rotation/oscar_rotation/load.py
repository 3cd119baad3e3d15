"""Rotations for serving one model, from a file or a built-in recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity, check_identity
from oscar_rotation.files.rotation_file import read_rotation_file, recorded_side
from oscar_rotation.files.rotation_set import RotationSet, Side
from oscar_rotation.recipes import BUILT_IN, FITTED


def load_rotation(
    path_or_recipe: str | Path,
    *,
    num_layers: int,
    head_dim: int,
    side: Side,
    model: ModelIdentity | None = None,
    layers: Sequence[int] | None = None,
) -> RotationSet:
    """Rotations for serving one model: read, checked in full, never replaced by a fallback.

    Args:
        path_or_recipe: a .pt file in the public schema, a .safetensors file, or the name of a built-in recipe:
            "identity" or "hadamard". A file of such a name is reached as "./identity".
        num_layers: attention layers of the model that have a cache to rotate.
        head_dim: channels per head of the model.
        side: "k" or "v": which cache the rotation is for.
        model: the served model; a file that states another one is refused. None skips this check. Layer count and
            head_dim must fit in any case.
        layers: ids of those layers, ascending; None where they are all layers of the model.

    Returns:
        RotationSet: ``rotations`` float32 [num_layers, head_dim, head_dim] on the CPU, or [num_layers, kv_heads,
        head_dim, head_dim] where every kv head has its own; ``eigenvalues`` float32 [num_layers, head_dim] or None,
        ``clip_ratios`` one per layer or None, ``metadata``.

    Raises:
        RotationFileError: one line that names the file, the fault and the remedy: a missing or unreadable file, a
            wrong schema or version, layers missing or too many, a wrong shape or dtype, NaN or infinite entries,
            not orthogonal, a file of an unknown recipe, for the other side or for another model.
    """
    if side not in get_args(Side):
        raise ValueError(f"side must be 'k' or 'v', got {side!r}")
    if isinstance(path_or_recipe, str) and path_or_recipe in BUILT_IN:
        return recipe_rotation(path_or_recipe, num_layers=num_layers, head_dim=head_dim, side=side)
    known = f"name a rotation file or a recipe: {', '.join(BUILT_IN)}"
    if not str(path_or_recipe):
        raise RotationFileError(f"no {side.upper()} rotation given; {known}")
    path = Path(path_or_recipe)
    if not path.exists() or path.is_dir():
        raise RotationFileError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {known}")
    loaded = read_rotation_file(path)
    if loaded.recipe not in FITTED:
        raise RotationFileError(
            f"{path}: is of the recipe {loaded.recipe}, this release knows {', '.join(FITTED)}; update sglang-oscar"
        )
    _check_side(loaded, path, side)
    if loaded.head_dim != head_dim:
        raise RotationFileError(
            f"{path}: made for head_dim {loaded.head_dim}, the model has {head_dim}; use this model's file"
        )
    if loaded.num_layers != num_layers:
        raise RotationFileError(
            f"{path}: holds {loaded.num_layers} layers, the model has {num_layers}; use this model's file"
        )
    ids = tuple(range(num_layers) if layers is None else layers)
    if loaded.ids != ids:
        first, wanted = next((a, b) for a, b in zip(loaded.ids, ids, strict=True) if a != b)
        raise RotationFileError(f"{path}: holds layer {first} where the model has {wanted}; use this model's file")
    if model is not None:
        check_identity(loaded, path, model)
    return loaded


def recipe_rotation(name: str, *, num_layers: int, head_dim: int, side: Side) -> RotationSet:
    """The built-in recipe ``name``, the same matrix in every layer; arguments as of :func:`load_rotation`.

    Raises:
        RotationFileError: unknown name, or head_dim not a power of two for "hadamard".
    """
    if name not in BUILT_IN:
        raise RotationFileError(f"unknown rotation recipe {name!r}; known are {', '.join(BUILT_IN)}")
    try:
        return BUILT_IN[name].build(num_layers=num_layers, head_dim=head_dim, side=side)
    except ValueError as error:
        raise RotationFileError(f"rotation recipe {name!r}: {error}") from error


def _check_side(loaded: RotationSet, path: Path, side: Side) -> None:
    recorded = recorded_side(loaded, path)
    if recorded and recorded != side:
        raise RotationFileError(
            f"{path}: is a {recorded.upper()} rotation (objective {loaded.metadata.objective!r}), "
            f"given as the {side.upper()} rotation; are the two paths swapped?"
        )
