"""Who may write to a folder of storage: whoever may can have a server answer with pages of their making."""

from __future__ import annotations

import logging
import os
import stat
from typing import Any

from sglang_oscar.errors import Int2Error

logger = logging.getLogger(__name__)
VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""Of SGLang: the folder of pages in files."""


def folder_of_files() -> str:
    """Where SGLang's files of pages go, unless its extra configuration says otherwise."""
    return os.environ.get(VARIABLE) or "/tmp/hicache"


def folders_of(backend: Any) -> list[str]:
    """Folders in which a storage backend of SGLang keeps pages on this machine.

    Args:
        backend: of files, or nixl; others keep theirs elsewhere, with rights of their own.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    if isinstance(backend, HiCacheFile):
        return [backend.file_path]
    return list(getattr(getattr(backend, "file_manager", None), "base_dirs", []))


def belongs_to_another(folder: str) -> bool:
    """Whether another user owns a folder, which in ``/tmp`` anybody may have made. Root's is taken: volumes of
    containers are, and root needs no folder to change what a server does.
    """
    try:
        return os.stat(folder).st_uid not in (os.geteuid(), 0)
    except FileNotFoundError:  # made at the start, by one of the ranks
        return False


def check_folder(folder: str) -> None:
    """Refuse a folder of another user; warn of one that all may write to.

    Raises:
        Int2Error: it belongs to another user.
    """
    if belongs_to_another(folder):
        raise Int2Error(
            f"int2 mode does not take pages from {folder}, which belongs to another user, who could put any there; "
            "give storage a folder of your own"
        )
    if os.path.exists(folder) and os.stat(folder).st_mode & stat.S_IWOTH:
        logger.warning(
            "int2 storage: every user of this machine may put pages into %s; `chmod o-w` it, or give storage a folder "
            "of its own", folder,
        )  # fmt: skip
