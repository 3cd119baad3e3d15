"""The two rotation files of a folder."""

from __future__ import annotations

from pathlib import Path

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import SUFFIXES


def rotation_files(folder: Path) -> tuple[Path, Path]:
    """The key and the value file of a rotations folder.

    Raises:
        RotationFileError: there is not exactly one of each.
    """
    found = []
    for side in ("k", "v"):
        files = sorted(path for path in folder.glob(f"{side}_rotation_*") if path.suffix in SUFFIXES)
        stems = {path.stem for path in files}
        if not stems:
            raise RotationFileError(
                f"{folder}: holds no {side}_rotation_* files, expected one; make them with `oscar calibrate`, or name "
                "another folder"
            )
        if len(stems) > 1:
            names = ", ".join(path.name for path in files)
            raise RotationFileError(
                f"{folder}: holds {len(stems)} different {side}_rotation_* files, expected one; delete all but that of "
                f"the fit you mean, or move them to a folder of their own: {names}"
            )
        found.append(files[0])
    return found[0], found[1]
