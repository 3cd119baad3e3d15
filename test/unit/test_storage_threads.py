"""Files of pages by several threads, straight from and into host memory: which storage, and that nobody waits."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sglang_oscar.tiers import hooks
from sglang_oscar.tiers.storage import CheckedStorage
from support.stored_pages import KEYS, SALT, HostMemoryBackend, Pool, backend, checked, damage, files, pages, room


@pytest.fixture
def store(tmp_path: Path) -> CheckedStorage:
    return checked(tmp_path / "store")


def test_many_pages_come_back_in_order(store: CheckedStorage) -> None:
    """Several threads read them: each into its own room, a missing one for itself."""
    keys, written = [f"{number:064x}" for number in range(1, 65)], pages(64)
    store.batch_set(keys, written)
    missing = set(random.Random(3).sample(range(64), 9))
    for number in missing:
        os.remove(Path(store.file_path, f"{store._get_suffixed_key(store.key(keys[number]))}.bin"))
    places = room(64)
    for number, got in enumerate(store.batch_get(keys, places)):
        assert got is None if number in missing else (got is places[number] and torch.equal(got, written[number]))


def test_files_are_read_straight_into_host_memory(tmp_path: Path) -> None:
    """A damaged and a missing one are said to be missing; the others lie where they are asked to be."""
    pool = Pool()
    store = CheckedStorage(backend(tmp_path / "store"), pool, SALT)  # type: ignore[arg-type]
    written = pages()
    store.batch_set(KEYS, written)
    slots = torch.arange(16 * 5, 16 * 8)
    assert store.batch_get_v1(KEYS, slots) == [True] * 3
    for number, page in enumerate(written):
        assert torch.equal(pool.pages.page(5 + number), page)
    damage(files(store)[KEYS[0]], "flipped")
    os.remove(files(store)[KEYS[1]])
    pool.pages.buffer.fill_(0)
    assert store.batch_get_v1(KEYS, slots) == [False, False, True]
    assert torch.equal(pool.pages.page(7), written[2])
    assert not pool.pages.page(4).any()


@pytest.mark.parametrize("how", ["files", "items of a layer together", "other storage", "another server"])
def test_which_pages_are_read_in_place(how: str, tmp_path: Path) -> None:
    """Those of files, where a page is one piece of host memory; SGLang reads the rest as ever."""
    files_of = backend(tmp_path / "store")
    kept: Any = HostMemoryBackend(Pool()) if how == "other storage" else files_of
    if how != "another server":
        kept = CheckedStorage(kept, Pool(page_first=how == "files"), SALT)  # type: ignore[arg-type]
    controller = SimpleNamespace(storage_backend=kept, _page_get_zero_copy=lambda *given: ("in place", *given))
    got = hooks.around_page_get(lambda *given: ("stock", *given[1:]), controller, "operation", KEYS, "slots")  # type: ignore[arg-type]
    assert got == ("in place" if how == "files" else "stock", "operation", KEYS, "slots", None)


def test_other_backends_are_asked_by_one_thread(tmp_path: Path) -> None:
    """Whether others may be asked by several threads at once is not known."""
    seen = set()

    class Backend:
        def get(self, key: str, *_: Any) -> None:
            seen.add(threading.get_ident())

        def batch_set(self, keys: list[str], *_: Any) -> bool:
            seen.add(threading.get_ident())
            return True

    store, keys = CheckedStorage(Backend(), Pool(), SALT), [f"{number:064x}" for number in range(64)]  # type: ignore[arg-type]
    store.batch_get(keys)
    assert store.batch_set(keys, pages(64))
    assert seen == {threading.get_ident()}


def test_a_page_that_cannot_be_written_takes_no_other_along(
    store: CheckedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch says so, which ends SGLang's writing of this prompt; pages before and behind are there."""
    stock, full = HiCacheFile.set, store.key(KEYS[1])
    monkeypatch.setattr(HiCacheFile, "set", lambda self, key, *page: key != full and stock(self, key, *page))
    assert not store.batch_set(KEYS, pages())
    assert [key for key in KEYS if files(store)[key].is_file()] == [KEYS[0], KEYS[2]]


def test_a_key_without_a_page_is_an_error(store: CheckedStorage) -> None:
    """Not a page that is silently left out."""
    with pytest.raises(ValueError, match="shorter"):
        store.batch_set(KEYS, pages(2))


def test_hits_do_not_wait_for_pages_that_are_written(store: CheckedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that write are others than those that read."""
    written, going_on = pages(), threading.Event()
    store.batch_set(KEYS, written)
    slow = HiCacheFile.set

    def wait_and_set(*given: Any) -> bool:
        assert going_on.wait(300)
        return slow(*given)

    monkeypatch.setattr(HiCacheFile, "set", wait_and_set)
    keys = [f"{number:064x}" for number in range(256, 320)]
    with ThreadPoolExecutor(1) as beside:
        backlog = beside.submit(store.batch_set, keys, pages(64))
        try:
            for page, got in zip(written, store.batch_get(KEYS, room()), strict=True):
                assert torch.equal(page, got)
            assert not backlog.done()
        finally:
            going_on.set()
        assert backlog.result(300)
    assert store.batch_exists(keys) == 64


def test_closing_ends_threads_and_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server from which storage is detached, and attached anew, keeps no threads of the former."""
    before = set(threading.enumerate())
    closed: list[HiCacheFile] = []

    def close(backend: HiCacheFile) -> None:
        closed.append(backend)

    store = checked(tmp_path / "store")
    store.batch_set(KEYS, pages())
    store.batch_get(KEYS, room())
    own = set(threading.enumerate()) - before
    assert {thread.name.rsplit("_", 1)[0] for thread in own} == {"int2-storage-read", "int2-storage-write"}
    monkeypatch.setattr(HiCacheFile, "close", close, raising=False)
    store.close()
    assert not any(thread.is_alive() for thread in own)
    assert closed == [store._backend]
    monkeypatch.undo()
    checked(tmp_path / "other").close()
