"""Temporary folders of a refit go with their process, however that ends; nobody else's do."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sglang_oscar.features.refitting.temporary import PREFIX, TemporaryFolder, remove_abandoned

MAKER = (
    "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
    "from sglang_oscar.features.refitting.temporary import TemporaryFolder\n"
    "folder = TemporaryFolder(); (folder.path / 'dump').write_text('x'); print(folder.path, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_of_a_process_that_is_killed(folder: Path) -> None:
    """Once it is, by whoever starts next, and not before."""
    (folder / f"{PREFIX}file").touch()
    (folder / f"{PREFIX}link").symlink_to(folder)
    with subprocess.Popen([sys.executable, "-c", MAKER, str(folder)], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        made = Path(maker.stdout.readline().strip())
        mine = TemporaryFolder()
        kept = (made / "dump").exists()
        maker.kill()
    assert kept
    remove_abandoned()
    assert not made.exists()
    assert sorted(folder.iterdir()) == sorted([mine.path, folder / f"{PREFIX}file", folder / f"{PREFIX}link"])


def test_that_nobody_refers_to(folder: Path) -> None:
    """What replaces one removes it."""
    kept = TemporaryFolder()
    (kept.path / "file").touch()
    kept = TemporaryFolder()
    assert list(folder.iterdir()) == [kept.path]
    kept.remove()
    kept.remove()
    assert list(folder.iterdir()) == []


def test_one_that_is_removed_before_it_is_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that starts just then: another one is made."""
    lock, raced = fcntl.flock, False

    def flock(descriptor: int, how: int) -> None:
        nonlocal raced
        if how == fcntl.LOCK_EX and not raced:
            raced = True
            remove_abandoned()
            assert list(folder.iterdir()) == []
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert TemporaryFolder().path.parent == folder
    assert raced


def test_without_locks_nothing_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError("no locks")

    made = folder / f"{PREFIX}other"
    made.mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    kept = TemporaryFolder()
    remove_abandoned()
    assert sorted(folder.iterdir()) == sorted([kept.path, made])
