"""Folders with rotation files that need no calibration: one that is named, and one beside a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oscar_rotation.errors import RotationFileError, first_line
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.zoo import FAILURES
from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.origin import cached_snapshot

VARIABLE = "SGLANG_OSCAR_ROTATIONS"
BESIDE_WEIGHTS = "oscar"
"""Folder in a checkpoint."""
WEIGHTS = ("*.safetensors", "*.json", f"{BESIDE_WEIGHTS}/*")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
TWICE = ["original/*", "consolidated*"]
"""Weights that are in other files, too."""

Pair = tuple[str, str]
"""Key and value rotation: paths, or names of built-in recipes."""


def named(source: str) -> Pair:
    """What SGLANG_OSCAR_ROTATIONS names.

    Args:
        source: a folder, a repository of the hub, ``owner/name`` or ``owner/name/folder``, or a built-in recipe.

    Raises:
        Int2Error: it is none of these, or has not one file for keys and one for values.
    """
    if source in BUILT_IN:
        return source, source
    folder = Path(source)
    if not folder.is_dir():
        if folder.is_absolute() or source.startswith(".") or source.count("/") < 1:
            raise Int2Error(
                f"{VARIABLE}: {source} is no folder, no repository of the hub and not {', '.join(BUILT_IN)}"
            )
        folder = _of_hub(source)
    return pair_in(folder, f"{VARIABLE}: {{}}")


def pair_in(folder: Path, said: str) -> Pair:
    """The rotation files of a folder.

    Args:
        folder: that is there.
        said: what is told where it does not hold one file for keys and one for values, with a place for the reason.

    Raises:
        Int2Error: it does not.
    """
    try:
        keys, values = rotation_files(folder)
    except RotationFileError as error:
        raise Int2Error(said.format(error)) from None
    return str(keys), str(values)


def _of_hub(source: str) -> Path:
    """The folder of a repository that rotations lie in.

    Raises:
        Int2Error: it cannot be had, or rotations lie in several of its folders.
    """
    owner, name, *below = source.split("/")
    try:
        root = download(f"{owner}/{name}", ("*_rotation_*",))
    except Int2Error as error:
        raise Int2Error(f"{VARIABLE}: {error}") from None
    if below:
        return root.joinpath(*below)
    folders = sorted({path.parent for path in root.rglob("k_rotation_*")})
    if len(folders) > 1:
        names = ", ".join(f"{owner}/{name}/{folder.relative_to(root)}" for folder in folders[:4])
        raise Int2Error(f"{VARIABLE}: {source} has rotations in {len(folders)} folders; name one: {names}")
    return folders[0] if folders else root


def download(
    repository: str, patterns: Sequence[str], revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Files of a repository, from the hub or, where that is not reached, what its cache has.

    Raises:
        Int2Error: neither has them.
    """
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repository, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns), ignore_patterns=TWICE
        )
    except (*FAILURES, OSError, ValueError) as error:
        raise Int2Error(
            f"{repository}: is no folder here, and cannot be had from the hub ({first_line(error)})"
        ) from None
    return Path(found)


def checkpoint(args: Any) -> Path:
    """The folder of a model's files, which are downloaded where they are not here.

    Args:
        args: server arguments.

    Raises:
        Int2Error: they cannot be had.
    """
    place = Path(args.model_path)
    if place.exists():
        return place
    asked = (args.revision, args.download_dir)
    folder = download(args.model_path, WEIGHTS, *asked)
    if not any(folder.glob("*.safetensors")):
        folder = download(args.model_path, OTHER_WEIGHTS, *asked)
    return cached_snapshot(args.model_path, args.revision or "main", args.download_dir) or folder


def beside_weights(folder: Path) -> Pair | None:
    """Rotation files that a checkpoint brings; None where it has none.

    Args:
        folder: of the checkpoint, or its one file.

    Raises:
        Int2Error: its folder ``oscar`` does not hold one file for keys and one for values.
    """
    if not (own := folder / BESIDE_WEIGHTS).is_dir():
        return None
    return pair_in(own, "the checkpoint's rotations: {}")
