"""Where a server's weights come from, and which they are, without reading them: part of every key of storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How names of files with weights end."""

_loaded: dict[tuple[str, str | None, str | None], dict[str, Any]] = {}
"""By path, revision and folder of downloads: what was there when this process loaded its weights."""


def weights_origin(model_path: str, revision: str | None, download_dir: str | None) -> dict[str, Any]:
    """Which weights a path means at the moment.

    Args:
        model_path: a folder, a file or the id of a hub.
        revision: of the hub.
        download_dir: where SGLang puts downloads, None for the default.

    Returns:
        ``path``, in full where it is local: a relative one means another model in another folder. Then ``files``, the
        name, size and time of change of each file of weights, or ``commit``, the hub's, None where no cache knows it.
    """
    place = Path(model_path)
    if not place.exists():
        return {"path": model_path, "commit": _commit(model_path, revision or "main", download_dir)}
    place = place.resolve()
    files = [place] if place.is_file() else [of for of in place.iterdir() if of.suffix in WEIGHT_FILES and of.is_file()]
    facts = sorted((file.name, (known := file.stat()).st_size, known.st_mtime_ns) for file in files)
    return {"path": str(place), "files": [list(of) for of in facts]}


def loaded_origin(args: Any) -> dict[str, Any]:
    """Which weights this process has loaded. Kept, as files may be overwritten while it serves the former ones.

    Args:
        args: server arguments as SGLang resolved them.
    """
    asked = (args.model_path, args.revision, args.download_dir)
    if asked not in _loaded:
        _loaded[asked] = weights_origin(*asked)
    return _loaded[asked]


def note_before_loading(args: Any) -> None:
    """Look at local files before they are read: one that changes meanwhile must not pass for what was read.

    What a hub id means is only known behind its download.

    Args:
        args: server arguments as SGLang resolved them.
    """
    if Path(args.model_path).exists():
        loaded_origin(args)


def _commit(repository: str, revision: str, download_dir: str | None) -> str | None:
    """The commit that a revision of a hub's repository means."""
    folder = cached_snapshot(repository, revision, download_dir)
    return None if folder is None else folder.name


def cached_snapshot(repository: str, revision: str = "main", download_dir: str | None = None) -> Path | None:
    """Where the files of a hub's repository are on this machine, in the caches and the order in which SGLang looks.

    Args:
        repository: its id.
        revision: a branch, a tag or a commit.
        download_dir: where SGLang puts downloads, None for the default.

    Returns:
        a folder named by the commit; None where no cache knows it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    for cache in filter(None, (download_dir, HF_HUB_CACHE)):
        folder = Path(cache, "--".join(["models", *repository.split("/")]))
        reference = folder / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        if (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    return None
