"""Calibrated rotations from a repository on the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from oscar_rotation.errors import RotationFileError, first_line
from oscar_rotation.files.rotation_file import SUFFIXES, read_rotation_file

REPO_VARIABLE = "OSCAR_ZOO_REPO"
FAILURES = (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError)
"""What the hub's client raises; errors of the connection come from httpx and are no OSError."""


@dataclass(frozen=True)
class ZooListing:
    """Rotation files of a repository at one commit: ``folders`` maps folder -> file names."""

    repo: str
    commit: str
    folders: dict[str, list[str]]


def zoo_repo(repo: str | None) -> str:
    """The repository to use: ``repo``, else the variable OSCAR_ZOO_REPO.

    Raises:
        RotationFileError: neither is given.
    """
    chosen = repo or os.environ.get(REPO_VARIABLE, "")
    if not chosen:
        raise RotationFileError(f"no zoo given; name its hub repository with --repo or {REPO_VARIABLE}")
    return chosen


def list_zoo(repo: str, revision: str | None = None, *, endpoint: str | None = None) -> ZooListing:
    """What a zoo holds.

    Args:
        repo: hub repository of rotation files, "owner/name".
        revision: branch, tag or commit; the default branch by default. The commit it stands for is in the answer;
            pass that to :func:`get_rotations` to pin it.
        endpoint: another hub than the default one.

    Raises:
        RotationFileError: no such repository or revision, no access, or no connection.
    """
    try:
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, timeout=30)
    except (*FAILURES, OSError, ValueError) as error:
        raise _explain(repo, revision, error) from error
    folders: dict[str, list[str]] = defaultdict(list)
    for sibling in info.siblings or []:
        path = PurePosixPath(sibling.rfilename)
        if path.suffix in SUFFIXES:
            folders[str(path.parent)].append(path.name)
    return ZooListing(repo, info.sha or "", dict(sorted(folders.items())))


def get_rotations(
    repo: str,
    paths: list[str],
    revision: str | None = None,
    *,
    offline: bool = False,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> list[Path]:
    """Download files, or take them from the cache, and check each as a server would.

    Args:
        repo: hub repository.
        paths: files inside it.
        revision: branch, tag or commit. A commit makes the result reproducible and needs no connection once cached.
        offline: use the cache only.
        endpoint, cache_dir: other than the hub client's defaults (HF_ENDPOINT, HF_HOME).

    Returns:
        the cached files, in the order of ``paths``.

    Raises:
        RotationFileError: what cannot be had or is not a usable rotation file.
    """
    found = []
    for path in paths:
        try:
            local = hf_hub_download(
                repo, path, revision=revision, local_files_only=offline, endpoint=endpoint, cache_dir=cache_dir
            )
        except (*FAILURES, OSError, ValueError) as error:
            raise _explain(f"{repo}/{path}", revision, error) from error
        read_rotation_file(local)
        found.append(Path(local))
    return found


def _explain(what: str, revision: str | None, error: Exception) -> RotationFileError:
    at = f" at revision {revision}" if revision else ""
    if isinstance(error, GatedRepoError):
        return RotationFileError(f"{what}: access is restricted; accept its terms and log in with `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return RotationFileError(f"{what}: no revision {revision}; `oscar zoo list` shows the current commit")
    if isinstance(error, RepositoryNotFoundError):
        return RotationFileError(f"{what}: no such repository, or a private one; check the name or `hf auth login`")
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        return RotationFileError(f"{what}{at}: not in the cache and the hub is not reached; fetch it once online")
    if isinstance(error, EntryNotFoundError):
        return RotationFileError(f"{what}{at}: no such file; `oscar zoo list` shows what there is")
    if isinstance(error, (*FAILURES, OSError)):
        fault = f"the hub cannot be reached ({type(error).__name__}); try again or --offline"
    else:
        fault = first_line(error)  # a name that no repository or file has
    return RotationFileError(f"{what}{at}: {fault}")
