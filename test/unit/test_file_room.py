"""Files of pages keep the bounds that SGLang sets a folder, page by page as it does, in few groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import LAYOUT, SALT, Pool, backend

SIZE = LAYOUT.page_bytes
OLD = [f"{number:064x}" for number in range(100)]
NEW = [f"{number:064x}" for number in range(1000, 1100)]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a disk of twelve pages."""
    folder = tmp_path / "store"

    def statvfs(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=12, f_frsize=SIZE, f_bavail=12 - len(list(folder.glob("*.bin"))))

    monkeypatch.setattr(os, "statvfs", statvfs)
    return folder


def slots(count: int) -> torch.Tensor:
    """Of as many pages, over and over those of the host tier."""
    return torch.cat([torch.arange(16) + 16 * (page % 8) for page in range(count)])


def there(store: CheckedStorage, keys: list[str]) -> list[int]:
    return [at for at, key in enumerate(keys) if store.exists(key)]


def counted(store: CheckedStorage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each call of the process writes."""
    calls, write = [], store._rows._writer.write

    def count(numbers: list[int], *rest: Any) -> Any:
        calls.append(len(numbers))
        return write(numbers, *rest)

    monkeypatch.setattr(store._rows._writer, "write", count)
    return calls


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("bound", ["max_size", "min_free_space"])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_as_many_are_kept_as_with_sglang(count: int, bound: str, ratio: float, disk: Path) -> None:
    """All pages of a batch are stored, the last of them stay, and the bound holds."""
    given = {"max_size": str(8 * SIZE)} if bound == "max_size" else {"min_free_space": str(4 * SIZE)}
    store = CheckedStorage(backend(disk, eviction_ratio=ratio, **given), Pool(), SALT)  # type: ignore[arg-type]
    assert store.batch_set_v1(OLD[:8], slots(8)) == [True] * 8
    assert there(store, OLD[:8]) == list(range(8))
    assert store.batch_set_v1(NEW[:count], slots(count)) == [True] * count
    kept, files = there(store, NEW[:count]), len(list(disk.glob("*.bin")))
    assert files <= 8
    assert store._evictor._total_bytes == files * SIZE
    assert not store._evictor._pending_writes
    assert kept == list(range(count))[-len(kept) :]
    assert len(kept) >= min(count, 4)
    store.close()


def test_pages_that_are_there_need_no_room(disk: Path) -> None:
    """Others are not evicted for them; they have just been used."""
    store = CheckedStorage(backend(disk, max_size=str(8 * SIZE), eviction_ratio=1.0), Pool(), SALT)  # type: ignore[arg-type]
    store.batch_set_v1(OLD[:8], slots(8))
    assert store.batch_set_v1([OLD[5], OLD[0], OLD[6]], slots(3)) == [True] * 3
    assert there(store, OLD[:8]) == list(range(8))
    assert store.batch_set_v1(NEW[:1], slots(1)) == [True]
    assert there(store, OLD[:8]) == [0, 2, 3, 4, 5, 6, 7]
    store.close()


def test_what_others_take_of_a_disk_is_left_to_them(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As many pages as fit, and SGLang says once that there is no more room."""
    store = CheckedStorage(backend(disk, min_free_space=str(4 * SIZE)), Pool(), SALT)  # type: ignore[arg-type]
    for number in range(6):
        (disk / f"other{number}.bin").touch()
    assert store.batch_set_v1(NEW[:2], slots(2)) == [True, True]
    for number in range(6, 9):
        (disk / f"other{number}.bin").touch()
    assert store.batch_set_v1(NEW[2:8], slots(6)) == [False] * 6
    assert len([record for record in caplog.records if "would fall below" in record.getMessage()]) == 1
    store.close()


def test_a_page_that_is_too_large_evicts_nothing(disk: Path) -> None:
    store = CheckedStorage(backend(disk, max_size=str(8 * SIZE)), Pool(), SALT)  # type: ignore[arg-type]
    store.batch_set_v1(OLD[:7], slots(7))
    store._evictor.max_size_bytes = SIZE - 1
    assert store.batch_set_v1(NEW[:2], slots(2)) == [False, False]
    assert there(store, OLD[:7]) == list(range(7))
    store.close()


@pytest.mark.parametrize("ratio", [0.9, 1.0])
def test_a_full_folder_takes_few_calls(ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each page, though each needs another's room."""
    given = {"max_size": str(100 * SIZE), "eviction_ratio": ratio}
    store = CheckedStorage(backend(tmp_path / "store", **given), Pool(), SALT)  # type: ignore[arg-type]
    calls = counted(store, monkeypatch)
    store.batch_set_v1(OLD, slots(100))
    assert store.batch_set_v1(NEW[:50], slots(50)) == [True] * 50
    assert calls == [100, 50]
    assert len(there(store, OLD)) == 50
    store.close()


def test_an_error_leaves_no_room_reserved(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckedStorage(backend(disk, max_size=str(8 * SIZE)), Pool(), SALT)  # type: ignore[arg-type]

    def write(*_: Any) -> None:
        raise IndexError("no such page")

    monkeypatch.setattr(store._rows._writer, "write", write)
    with pytest.raises(IndexError, match="no such page"):
        store.batch_set_v1(NEW[:2], slots(2))
    assert (store._evictor._total_bytes, store._evictor._pending_writes) == (0, set())
    store.close()
