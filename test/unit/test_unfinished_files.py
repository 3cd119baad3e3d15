"""Files that a killed process left unfinished are removed by the next one that writes; no others are."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_oscar.features.tiers.page_files import ABANDONED_SECONDS, UNFINISHED, remove_abandoned, unfinished_file
from support.api import wait_for
from support.stored_pages import KEYS, checked

WRITER = (
    "import sys, time; from sglang_oscar.features.tiers.page_files import unfinished_file\n"
    "file = unfinished_file(sys.argv[1]); file.write(b'half'); file.flush(); print(flush=True); time.sleep(600)\n"
)


def unfinished(folder: Path) -> list[Path]:
    return list(folder.glob(f"{UNFINISHED}*"))


def test_of_a_process_that_was_killed(tmp_path: Path) -> None:
    """Once it is, and not before; stock servers' files, which say nothing of who writes them, stay."""
    store = checked(tmp_path)
    (stock := tmp_path / f".{'0' * 32}.tmp").touch()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        os.utime(unfinished(tmp_path)[0], (0, 0))  # a disk that hangs: it is still being written
        assert store.batch_set_v1(KEYS[:1], torch.arange(16)) == [True]
        remove_abandoned(str(tmp_path))
        assert len(unfinished(tmp_path)) == 1
        writer.kill()
    store.close()
    assert store.batch_set_v1(KEYS, torch.arange(48)) == [True] * 3
    wait_for(lambda: unfinished(tmp_path) == [], "what was left is removed beside the writing")
    assert stock.exists()
    store.close()


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems that have none."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with unfinished_file(str(tmp_path)) as young, unfinished_file(str(tmp_path)) as old:
        then = time.time() - ABANDONED_SECONDS - 9
        os.utime(old.name, (then, then))
        remove_abandoned(str(tmp_path))
        assert unfinished(tmp_path) == [Path(str(young.name))]


def test_a_file_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another server that starts just then: the page is written to another file."""
    lock, raced = fcntl.flock, False

    def flock(file: Any, how: int) -> None:
        nonlocal raced
        if not raced:
            raced = True
            remove_abandoned(str(tmp_path))
            assert unfinished(tmp_path) == []
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with unfinished_file(str(tmp_path)) as file:
        assert unfinished(tmp_path) == [Path(str(file.name))]
    remove_abandoned(str(tmp_path / "none"))
