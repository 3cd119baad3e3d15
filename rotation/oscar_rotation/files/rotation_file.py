"""Rotation files: the one place where they are read and written, whatever their format."""

from __future__ import annotations

import re
from pathlib import Path

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_set import RotationSet, Side, check_rotation_set
from oscar_rotation.files.safetensors_format import read_safetensors, save_safetensors
from oscar_rotation.files.zoo_format import read_zoo, save_zoo
from oscar_rotation.math.compose import DEFAULT_COMPOSITION

SUFFIXES = {".pt": (read_zoo, save_zoo), ".safetensors": (read_safetensors, save_safetensors)}
_SIDES_OF_TARGET = {"qqt": "k", "ktk": "k", "sst": "v", "vtv": "v", "proxy": "v"}
"""Targets that one side only can have, for files that do not state their side."""


def rotation_file_name(side: Side, target: str, composition: str = DEFAULT_COMPOSITION, suffix: str = ".pt") -> str:
    """File name in the zoo's form.

    >>> rotation_file_name("k", "qqt"), rotation_file_name("v", "sst")
    ('k_rotation_qqt_r_h_pbr.pt', 'v_rotation_sst_r_h_pbr.pt')
    """
    return f"{side}_rotation_{target}_{composition}{suffix}"


def read_rotation_file(path: str | Path) -> RotationSet:
    """Read and check a rotation file on its own, knowing nothing of a model.

    Args:
        path: .pt (public schema) or .safetensors.

    Returns:
        RotationSet on the CPU.

    Raises:
        RotationFileError: one line that names the file, the fault and the remedy: missing, unreadable, of a wrong
            schema or version, layers missing, a wrong shape or dtype, NaN or infinite entries, not orthogonal.
    """
    path = Path(path)
    if not path.exists():
        raise RotationFileError(f"{path}: no such file")
    if path.is_dir():
        raise RotationFileError(f"{path}: is a folder; name the file in it")
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
