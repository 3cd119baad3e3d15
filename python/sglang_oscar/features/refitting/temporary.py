"""Temporary folders that go with their process: SGLang ends schedulers by SIGKILL, so they cannot tidy up behind them.

A folder is locked as long as its process lives, and those that nobody has locked are removed by whoever starts or makes
one next. Activations of a refit are gigabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import weakref
from pathlib import Path

PREFIX = "oscar-refit."
"""How their names begin."""


class TemporaryFolder:
    """A new folder, locked until it is removed: when nobody refers to this any more, or ``remove()`` is called.

    Attributes:
        path: where it is.
        remove: removes it and what is in it, as far as that can be.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = os.open(self.path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks, where nobody removes any
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                break
            os.close(lock)  # removed by a process that looked before it was locked
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned() -> None:
    """Remove those of this user whose process has ended."""
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # gone by now, another user's, no folder, in use, or no locks here
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
