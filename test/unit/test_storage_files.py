"""Files of pages by processes of their own: between files and host memory, in order, whatever happens to a process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from sglang_oscar.features.tiers import hooks
from sglang_oscar.features.tiers.file_process import FileProcess
from sglang_oscar.features.tiers.page_files import FAILED, MISSING, OK, Outcome
from sglang_oscar.features.tiers.pool_files import PoolFiles
from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import KEYS, LAYOUT, SALT, HostMemoryBackend, Pool, backend, checked, damage, files, pages

LAYOUTS = pytest.mark.parametrize("page_first", [True, False])
SLOTS = torch.arange(16 * 3)


def storage(files_of: HiCacheFile, page_first: bool = True) -> tuple[CheckedStorage, Pool]:
    """Storage, and its host tier of eight pages, the first three of which hold something."""
    pool = Pool(page_first)
    for number, page in enumerate(pages()):
        pool.pages.set_page(number, page)
    return CheckedStorage(files_of, pool, SALT), pool  # type: ignore[arg-type]


def popen(process: FileProcess) -> subprocess.Popen[bytes]:
    """The process that it has started."""
    assert process._process is not None
    return process._process._process


def rows(pool: Pool, number: int) -> torch.Tensor:
    """A page without its trailer."""
    return pool.pages.page(number)[: LAYOUT.item_bytes].clone()


@LAYOUTS
def test_pages_come_back_into_host_memory(page_first: bool, tmp_path: Path) -> None:
    """A damaged and a missing one are said to be missing; the rest lies where it is asked to be and nowhere else."""
    store, pool = storage(backend(tmp_path / "store"), page_first)
    written = [rows(pool, number) for number in range(3)]
    assert store.batch_set_v1(KEYS, SLOTS) == [True] * 3
    assert store.batch_exists(KEYS) == 3
    pool.pages.buffer.fill_(0)
    slots = torch.arange(16 * 5, 16 * 8)
    assert store.batch_get_v1(KEYS, slots) == [True] * 3
    for number, page in enumerate(written):
        assert torch.equal(rows(pool, 5 + number), page)
    damage(files(store)[KEYS[0]], "flipped")
    os.remove(files(store)[KEYS[1]])
    pool.pages.buffer.fill_(0)
    assert store.batch_get_v1(KEYS, slots) == [False, False, True]
    assert torch.equal(rows(pool, 7), written[2])
    assert not any(rows(pool, number).any() for number in range(7))
    store.close()


@pytest.mark.parametrize("index", [False, True])
def test_pages_are_there_up_to_the_first_that_is_not(index: bool, tmp_path: Path) -> None:
    """With SGLang's index of files, which knows of what it has written or seen, and without."""
    store, _ = storage(backend(tmp_path / "store", enable_metadata_cache=index))
    assert store.batch_exists(KEYS) == 0
    store.batch_set_v1(KEYS[:2], SLOTS[:32])
    assert store.batch_exists(KEYS) == 2
    assert store.batch_exists(KEYS[:2]) == 2
    assert store.batch_exists(KEYS[2:]) == store.batch_exists([]) == 0
    assert store.batch_exists([f"{number:064x}" for number in range(500)]) == 0
    store.close()


def test_one_by_one_or_together_pages_are_the_same(tmp_path: Path) -> None:
    """What the process writes SGLang's own way reads, and the other way round."""
    store, pool = storage(backend(tmp_path / "store"))
    assert store.batch_set(KEYS[:1], [pool.pages.page(0).clone()])
    assert store.batch_set_v1(KEYS[1:], SLOTS[16:]) == [True, True]
    room = torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8)
    assert torch.equal(store.get(KEYS[1], room)[: LAYOUT.item_bytes], rows(pool, 1))  # type: ignore[index]
    assert store.batch_get_v1(KEYS[:1], torch.arange(16 * 7, 16 * 8)) == [True]
    assert torch.equal(rows(pool, 7), rows(pool, 0))
    store.close()


@pytest.mark.parametrize("how", ["flipped", "trailer", "truncated", "empty"])
def test_damaged_files_are_missed(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one line, and are written anew afterwards."""
    store, pool = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS, SLOTS)
    written = rows(pool, 1)
    damage(files(store)[KEYS[1]], how)
    there = torch.arange(16 * 4, 16 * 7)
    assert store.batch_get_v1(KEYS, there) == [True, False, True]
    assert len([record for record in caplog.records if "is damaged" in record.getMessage()]) == 1
    assert not store.exists(KEYS[1])
    assert store.batch_set_v1(KEYS, SLOTS) == [True] * 3
    assert store.batch_get_v1(KEYS, there) == [True] * 3
    assert torch.equal(rows(pool, 5), written)
    store.close()


def test_a_damaged_file_that_cannot_be_removed_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another user or on a disk that is read only: it is a miss like others, and is said to stay."""
    store, _ = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS, SLOTS)
    damage(files(store)[KEYS[1]], "flipped")

    def remove(path: str) -> None:
        raise PermissionError(f"not yours: {path}")

    monkeypatch.setattr(os, "remove", remove)
    assert store.batch_get_v1(KEYS, torch.arange(16 * 4, 16 * 7)) == [True, False, True]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is damaged" in said
    assert "cannot be removed (not yours: " in said
    store.close()


def test_a_page_under_another_key_is_missed(tmp_path: Path) -> None:
    store, _ = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS, SLOTS)
    os.replace(files(store)[KEYS[0]], files(store)[KEYS[1]])
    assert store.batch_get_v1(KEYS, SLOTS) == [False, False, True]
    store.close()


@settings(max_examples=20)  # each starts a process
@given(count=st.integers(1, 8), part=st.integers(1, 5), seed=st.integers(0, 99))
def test_parts_of_any_size_keep_the_order(
    count: int, part: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pages in any order, more of them than the shared memory holds, some of which are missing."""
    pool, rng = Pool(page_first=bool(seed % 2)), random.Random(seed)
    for number, page in enumerate(pages(8, seed)):
        pool.pages.set_page(number, page)
    folder, numbers = tmp_path_factory.mktemp("files"), rng.sample(range(8), count)
    paths, keys = [str(folder / f"{n}.bin") for n in numbers], [f"{n:064x}" for n in numbers]
    process = FileProcess(pool.pages, 2 * part * LAYOUT.page_bytes)
    try:
        assert process.write(numbers, paths, keys) == [Outcome(OK)] * count
        before = [rows(pool, number) for number in range(8)]
        gone = {number for number in numbers if rng.random() < 0.3}
        for number in gone:
            os.remove(folder / f"{number}.bin")
        pool.pages.buffer.fill_(0)
        assert process.read(numbers, paths, keys) == [Outcome(MISSING if n in gone else OK) for n in numbers]
        for number in range(8):
            kept = number in numbers and number not in gone
            assert torch.equal(rows(pool, number), before[number] if kept else torch.zeros_like(before[number]))
    finally:
        process.close()


@pytest.mark.parametrize("how", ["files", "other storage", "another server"])
def test_which_pages_are_moved_so(how: str, tmp_path: Path) -> None:
    """Those of files; SGLang moves the rest as ever."""
    files_of = backend(tmp_path / "store")
    kept: Any = HostMemoryBackend(Pool()) if how == "other storage" else files_of
    if how != "another server":
        kept = CheckedStorage(kept, Pool(), SALT)  # type: ignore[arg-type]
    controller = SimpleNamespace(
        storage_backend=kept,
        _page_get_zero_copy=lambda *given: ("in place", *given),
        _page_set_zero_copy=lambda *given: ("in place", *given),
    )

    def stock(_: Any, *given: Any) -> tuple[Any, ...]:
        return ("stock", *given)

    found = "in place" if how == "files" else "stock"
    got = hooks.around_page_get(stock, controller, "operation", KEYS, "slots")  # type: ignore[arg-type]
    assert got == (found, "operation", KEYS, "slots", None)
    got = hooks.around_page_set(stock, controller, KEYS, "slots")  # type: ignore[arg-type]
    assert got == (found, KEYS, "slots", None)


def test_a_page_that_cannot_be_written_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said why, nothing is left of it, and the folder has its room again."""
    store, _ = storage(backend(tmp_path / "store", max_size=str(100 * LAYOUT.page_bytes)))
    paths, bad = PoolFiles.path, store.key(KEYS[1])
    monkeypatch.setattr(
        PoolFiles, "path", lambda self, key: str(tmp_path / "none" / "x") if key == bad else paths(self, key)
    )
    assert store.batch_set_v1(KEYS, SLOTS) == [True, False, True]
    assert any("1 of 3 pages are not stored; the first, " in record.getMessage() for record in caplog.records)
    assert [key for key in KEYS if files(store)[key].is_file()] == [KEYS[0], KEYS[2]]
    assert not list(Path(store.file_path).glob(".*"))
    assert store._evictor._total_bytes == 2 * LAYOUT.page_bytes
    assert not store._evictor._pending_writes
    store.close()


def test_a_full_disk_is_said_once_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = storage(backend(tmp_path / "store"))
    monkeypatch.setattr(store._rows._writer, "write", lambda numbers, *_: [Outcome(FAILED, "disk full")] * len(numbers))
    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert "3 of 3 pages are not stored" in said
    assert said.endswith("disk full")
    store.close()


def test_a_key_without_a_page_is_an_error(tmp_path: Path) -> None:
    """Not a page that is silently left out."""
    store, _ = storage(backend(tmp_path / "store"))
    with pytest.raises(ValueError, match="shorter"):
        store.batch_set(KEYS, pages(2))
    with pytest.raises(IndexError, match="pages 0 to 8 of 8"):
        store._rows._writer.write([0, 8], [str(tmp_path / "a"), str(tmp_path / "b")], KEYS[:2])
    assert not (tmp_path / "a").exists()
    for move in (store._rows._writer.write, store._rows._reader.read):
        with pytest.raises(ValueError, match="shorter"):
            move([0, 1, 2], ["a", "b"], KEYS)
    store.close()


def test_other_backends_are_asked_by_one_thread() -> None:
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


def test_a_folder_with_a_limit_keeps_it(tmp_path: Path) -> None:
    """SGLang removes what was used longest ago, of what the process wrote too; what was just read stays."""
    store, _ = storage(backend(tmp_path / "store", max_size=str(2 * LAYOUT.page_bytes), eviction_ratio=1.0))
    assert store.batch_set_v1(KEYS[:2], SLOTS[:32]) == [True, True]
    assert store.batch_get_v1(KEYS[:1], torch.arange(16 * 7, 16 * 8)) == [True]
    assert store.batch_set_v1(KEYS[2:], SLOTS[32:]) == [True]
    assert [key for key in KEYS if files(store)[key].is_file()] == [KEYS[0], KEYS[2]]
    store.close()


def test_an_index_of_files_knows_what_processes_did(tmp_path: Path) -> None:
    """Of SGLang's, where it is asked for: pages that were written are in it, and those that are gone are not."""
    store, _ = storage(backend(tmp_path / "store", enable_metadata_cache=True, metadata_ttl=600))
    names = [store._get_suffixed_key(store.key(key)) for key in KEYS]
    store.batch_set_v1(KEYS, SLOTS)
    assert all(map(store.metadata_cache.contains, names))
    os.remove(files(store)[KEYS[0]])
    damage(files(store)[KEYS[1]], "flipped")
    assert store.batch_get_v1(KEYS, SLOTS) == [False, False, True]
    assert [store.metadata_cache.contains(name) for name in names] == [False, False, True]
    store.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_is_killed_is_replaced(busy: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it should have moved is not stored, which is said; what comes next is moved by another one."""
    store, pool = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS[:1], SLOTS[:16])
    process = popen(store._rows._writer)
    if busy:
        os.kill(process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as beside:
            result = beside.submit(store.batch_set_v1, KEYS, SLOTS)
            process.kill()
            assert result.result(300) == [False] * 3
    else:
        process.kill()
        process.wait()
        assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert any("ended with -9" in record.getMessage() for record in caplog.records)
    assert store.batch_set_v1(KEYS, SLOTS) == [True] * 3
    written = rows(pool, 2)
    assert store.batch_get_v1(KEYS, torch.arange(16 * 5, 16 * 8)) == [True] * 3
    assert torch.equal(rows(pool, 7), written)
    store.close()


def test_files_outlive_a_process_that_should_read_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says nothing of a file that it could not be read: it is a miss, and is there the next time."""
    store, pool = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS, SLOTS)
    assert store.batch_get_v1(KEYS[:1], SLOTS[:16]) == [True]
    process = popen(store._rows._reader)
    process.kill()
    process.wait()
    pool.pages.buffer.fill_(0)
    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3
    assert not pool.pages.buffer.any()
    assert len([record for record in caplog.records if "3 of 3 pages cannot be read" in record.getMessage()]) == 1
    assert store.batch_get_v1(KEYS, SLOTS) == [True] * 3
    store.close()


def test_hits_do_not_wait_for_pages_that_are_written(tmp_path: Path) -> None:
    """The process that writes is another than the one that reads."""
    store, pool = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS[:1], SLOTS[:16])
    process = popen(store._rows._writer)
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as beside:
        backlog = beside.submit(store.batch_set_v1, KEYS[1:], SLOTS[16:])
        try:
            assert store.batch_get_v1(KEYS[:1], torch.arange(16 * 7, 16 * 8)) == [True]
            assert torch.equal(rows(pool, 7), rows(pool, 0))
            assert not backlog.done()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert backlog.result(300) == [True, True]
    store.close()


def test_closing_ends_processes_and_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server from which storage is detached, and attached anew, keeps no processes of the former."""
    closed: list[HiCacheFile] = []
    store, _ = storage(backend(tmp_path / "store"))
    store.batch_set_v1(KEYS, SLOTS)
    store.batch_get_v1(KEYS, SLOTS)
    processes = [popen(store._rows._reader), popen(store._rows._writer)]

    def close(backend: HiCacheFile) -> None:
        closed.append(backend)

    monkeypatch.setattr(HiCacheFile, "close", close, raising=False)
    store.close()
    assert [process.poll() for process in processes] == [0, 0]
    assert closed == [store._backend]
    monkeypatch.undo()
    checked(tmp_path / "other").close()


def test_processes_end_with_the_server(tmp_path: Path) -> None:
    """Also with one that is killed: its error output, which a process has too, is then closed."""
    program = (
        "import os, sys, pathlib; from test_storage_files import storage, backend, KEYS, SLOTS\n"
        "store, _ = storage(backend(pathlib.Path(sys.argv[1])))\n"
        "store.batch_set_v1(KEYS, SLOTS); os.kill(os.getpid(), 9)\n"
    )
    here = Path(__file__).parent
    found = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": found}, capture_output=True, timeout=300, check=False
    )
    assert ended.returncode == -9


def test_the_process_is_small() -> None:
    """It is started while a server serves, and one of it reads while another one writes: no PyTorch in it.

    The interpreter itself says what it imports. Such a program is never forked from one that has imported PyTorch, as
    others of a test run may be.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import sglang_oscar.features.tiers.page_files"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "sglang_oscar.features.tiers.page_files" in imported
    assert imported.isdisjoint({"torch", "numpy"})
