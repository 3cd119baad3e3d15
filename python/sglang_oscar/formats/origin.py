"""Which weights a server has, by samples of what their files hold: part of every key of storage, and of what a prefill
and a decode server compare.

Local files are noted where a server is launched, before anything is read: one that changes meanwhile must not pass for
what was read. What a hub id means is only known behind its download, and is noted once weights are loaded. Weights that
are updated later are nobody's but this process's.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import drafts_with_model
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.safetensors_header import read_header, tensors_of
from sglang_oscar.names import WEIGHTS_SEEN

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How names of files with weights end."""
SAMPLE_BYTES, SAMPLE_EVERY = 4096, 1 << 20
"""A sample, and how far apart they are at most in a tensor; or in a file that does not say where tensors are."""
WHOLE_BYTES = 1 << 16
"""A tensor that is read as a whole."""
READERS = 8
"""Files that are sampled at once, for those that are not on this machine."""


class Checkpoint(NamedTuple):
    """What a server is told of weights: a path or the id of a hub, its revision, and the folder of downloads."""

    path: str
    revision: str | None
    download_dir: str | None


Files = dict[Path, tuple[int, int]]
"""Bytes and time of change of files."""

_loaded: dict[Checkpoint, Files | None] = {}
"""The files that this process has loaded; None where there are none here."""


_update = ""
_changes = 0


def note_changed() -> None:
    """Weights come in, or have."""
    global _changes
    _changes += 1
    note_updated()


def changes() -> int:
    """Grows with every update of weights."""
    return _changes


def note_updated() -> None:
    """The weights are no longer those that were loaded, nor those of the last update."""
    global _update
    _update = secrets.token_hex(16)


def note_flushed() -> None:
    """Nothing that was computed before is in the cache: what older weights computed shall not be found again."""
    if _update:
        note_updated()


def update() -> str:
    """What tells the weights since an update from all others, in any process; empty where there was none."""
    return _update


def weight_files(place: Path) -> list[Path]:
    """Files that SGLang loads of a folder that may have the same weights in several formats: those that its index
    names, or all of the first format; a file is one.
    """
    if place.is_file():
        return [place]
    formats = [_named_by_index(place), *(sorted(place.glob(f"*{kind}")) for kind in WEIGHT_FILES)]
    return next(filter(None, formats), [])


def _named_by_index(folder: Path) -> list[Path]:
    """Files that the index of a sharded checkpoint names and that are here; others beside them are not loaded."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [path for name in names if (path := folder / str(name)).is_file()]


def of_model(server_args: Any) -> Checkpoint:
    """The checkpoint of a server's model."""
    args = releases.resolved(server_args)
    return Checkpoint(args.model_path, args.revision, args.download_dir)


def of_drafts(server_args: Any) -> Checkpoint | None:
    """That of its draft model, which is the model's own where that brings a draft layer along; None without one."""
    args = releases.resolved(server_args)
    if not drafts_with_model(args):
        return None
    path = args.speculative_draft_model_path or args.model_path
    return Checkpoint(path, args.speculative_draft_model_revision, args.download_dir)


def _checkpoints(server_args: Any) -> list[Checkpoint]:
    return [of for of in (of_model(server_args), of_drafts(server_args)) if of is not None]


def note_before_loading(server_args: Any) -> None:
    """Note local files in server arguments, for the workers that are going to read them."""
    places = {of.path: Path(of.path) for of in _checkpoints(server_args)}
    seen = {path: _seen(place) for path, place in places.items() if place.exists()}
    if seen:
        server_args.__dict__[WEIGHTS_SEEN] = seen


def note_loaded(server_args: Any) -> None:
    """Note which files the weights of this process are, unless that is known."""
    seen = getattr(server_args, "__dict__", {}).get(WEIGHTS_SEEN, {})
    for of in _checkpoints(server_args):
        if of not in _loaded:
            place = Path(of.path)
            folder = place if place.exists() else cached_snapshot(of.path, of.revision or "main", of.download_dir)
            _loaded[of] = seen.get(of.path) if of.path in seen or folder is None else _seen(folder)


def _seen(place: Path) -> Files:
    return {path: _facts(path) for path in weight_files(place.resolve())}


def _facts(path: Path) -> tuple[int, int]:
    known = path.stat()
    return known.st_size, known.st_mtime_ns


def loaded_weights(server_args: Any, of: Checkpoint) -> dict[str, Any]:
    """Which weights this process has loaded: the same of copies, wherever they are, and others of other weights.

    Args:
        server_args: as the worker has them.
        of: one of the server's checkpoints.

    Returns:
        ``contents``, a digest of each file; ``address`` and ``revision`` where no files are here (``s3://...``);
        nothing behind an update, which has a name of its own (:func:`update`).

    Raises:
        Int2Error: files have changed since they were loaded, and nothing says any more which weights those were.
        OSError: one cannot be read.
    """
    if _update:
        return {}
    note_loaded(server_args)
    noted = _loaded[of]
    if noted is None:
        return {"address": of.path, "revision": of.revision}
    if changed := [path for path, facts in noted.items() if not path.exists() or _facts(path) != facts]:
        raise Int2Error(
            f"int2 mode cannot say which weights it serves: {changed[0]} has changed since it was loaded, so that "
            "nothing tells pages in storage from those of others; start the server anew"
        )
    with ThreadPoolExecutor(READERS) as readers:
        return {"contents": sorted(readers.map(sample_digest, noted))}


def sample_digest(path: Path) -> str:
    """SHA-256 of a file of weights, by samples: weights that were trained further have the names and sizes of the old
    ones, but other bytes nearly everywhere. Of a safetensors file every tensor is sampled, small ones as a whole.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest.update(str(size).encode())
        header = read_header(descriptor) if path.suffix == ".safetensors" else b""
        digest.update(header)
        for begin, end in _tensors(header, size):
            for place in _places(begin, end):
                digest.update(os.pread(descriptor, min(SAMPLE_BYTES, end - place), place))
    return digest.hexdigest()


def _tensors(header: bytes, size: int) -> list[tuple[int, int]]:
    """Begin and end of every tensor that a header tells of; all that follows it where it tells of none."""
    begin = len(header)
    try:
        tensors = [of["data_offsets"] for of in tensors_of(header).values()]
        return sorted((begin + first, min(begin + last, size)) for first, last in tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [(begin, size)]


def _places(begin: int, end: int) -> list[int]:
    """Where samples of a part begin, the first and the last at its ends; all of it where it is small."""
    if end - begin <= WHOLE_BYTES:
        return list(range(begin, end, SAMPLE_BYTES))
    room = end - SAMPLE_BYTES - begin
    gaps = -(-room // SAMPLE_EVERY)
    return [begin + room * gap // gaps for gap in range(gaps + 1)]


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
