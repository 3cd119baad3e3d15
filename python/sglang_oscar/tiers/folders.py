"""Who may write to a folder of storage: whoever may can have a server answer with pages of their making."""

from __future__ import annotations

import logging
import os
import stat
from typing import Any

from sglang_oscar.errors import Int2Error

logger = logging.getLogger(__name__)


def folders_of(backend: Any) -> list[str]:
    """Folders in which a storage backend of SGLang keeps pages on this machine.

    Args:
        backend: of files, or nixl; others keep theirs elsewhere, with rights of their own.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    if isinstance(backend, HiCacheFile):
        return [backend.file_path]
    return list(getattr(getattr(backend, "file_manager", None), "base_dirs", []))


def check_folder(folder: str) -> None:
    """Refuse a folder of another user, which in ``/tmp`` anybody may have made; warn of one that all may write to.

    Args:
        folder: that is there, or will be made by another rank.

    Raises:
        Int2Error: it belongs to another user, and not to root, as a volume of a container may.
    """
    try:
        known = os.stat(folder)
    except FileNotFoundError:
        return
    if known.st_uid not in (os.geteuid(), 0):
        raise Int2Error(
            f"int2 mode does not take pages from {folder}, which belongs to another user (uid {known.st_uid}), who "
            "could put any there; give storage a folder of your own, or chown this one"
        )
    if known.st_mode & stat.S_IWOTH:
        logger.warning(
            "int2 storage: every user of this machine may put pages into %s; `chmod o-w` it, or give storage a folder "
            "of its own", folder,
        )  # fmt: skip
