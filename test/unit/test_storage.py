"""Pages in storage: keys that only the same rows of the same model have, and damaged pages that are misses."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageExtraInfo, PoolName, PoolTransfer
from transformers import Qwen3Config

from oscar_kernels.format import LayerFormat, SideFormat, fingerprint
from oscar_kernels.transform import SideTransform
from sglang_oscar.errors import Int2Error
from sglang_oscar.tiers import hooks
from sglang_oscar.tiers.arguments import check_storage
from sglang_oscar.tiers.pages import HostPages, PageLayout
from sglang_oscar.tiers.salt import model_facts, storage_salt
from sglang_oscar.tiers.storage import CheckedStorage

LAYOUT = PageLayout(16, ((36, 40), (36, 64)))
KEYS = [f"{number:064x}" for number in (0xA, 0xB, 0xC)]
SALT = "5a"


class Pool:
    """As much of a host tier as storage asks for."""

    page_layout = LAYOUT
    page_size = LAYOUT.page_size

    def __init__(self, page_first: bool = True) -> None:
        self.pages = HostPages(LAYOUT, torch.zeros(8 * LAYOUT.page_bytes, dtype=torch.uint8), page_first)

    def get_data_page(self, slot: int) -> torch.Tensor:
        return self.pages.page(slot // 16)

    def set_from_flat_data_page(self, slot: int, page: torch.Tensor) -> None:
        self.pages.set_page(slot // 16, page)


def backend(folder: Path) -> HiCacheFile:
    config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config |= {"model_name": "m", "is_mla_model": False, "extra_config": None, "dcp_size": 1}
    return HiCacheFile(SimpleNamespace(**config), str(folder))


@pytest.fixture
def store(tmp_path: Path) -> CheckedStorage:
    return CheckedStorage(backend(tmp_path / "store"), Pool(), SALT)  # type: ignore[arg-type]


def pages(count: int = 3, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (LAYOUT.page_bytes,), generator=generator).byte() for _ in range(count)]


def room(count: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8) for _ in range(count)]


def files(store: CheckedStorage) -> dict[str, Path]:
    """Files by SGLang's keys."""
    return {key: Path(store.file_path, f"{store._get_suffixed_key(store.key(key))}.bin") for key in KEYS}


def test_pages_come_back(store: CheckedStorage) -> None:
    written = pages()
    assert store.batch_exists(KEYS) == 0
    assert store.batch_set(KEYS, written)
    assert store.batch_exists(KEYS) == 3
    assert store.exists(KEYS[2])
    for page, got in zip(written, store.batch_get(KEYS, room()), strict=True):
        assert torch.equal(page, got)
    assert store.get("f" * 64, room(1)[0]) is None
    assert all(path.stat().st_size == LAYOUT.page_bytes for path in files(store).values())


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[random.Random(7).randrange(len(content) - LAYOUT.trailer_bytes)] ^= 4
    elif how == "trailer":
        content[-LAYOUT.trailer_bytes] ^= 1
    elif how == "truncated":
        del content[-100:]
    path.write_bytes(b"" if how == "empty" else content)


@pytest.mark.parametrize("how", ["flipped", "trailer", "truncated", "empty"])
def test_damaged_pages_are_missed(how: str, store: CheckedStorage, caplog: pytest.LogCaptureFixture) -> None:
    """With one line, without the pages before and behind; they are written anew afterwards."""
    written = pages()
    store.batch_set(KEYS, written)
    damage(files(store)[KEYS[1]], how)
    first, second, third = store.batch_get(KEYS, room())
    assert second is None
    assert torch.equal(first, written[0])
    assert torch.equal(third, written[2])
    said = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(said) == 1
    assert store.key(KEYS[1])[:12] in said[0]
    assert not store.exists(KEYS[1])
    assert store.set(KEYS[1], written[1].clone())
    assert torch.equal(store.get(KEYS[1], room(1)[0]), written[1])


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


def test_a_page_under_another_key_is_missed(store: CheckedStorage) -> None:
    store.batch_set(KEYS[:2], pages(2))
    os.replace(files(store)[KEYS[0]], files(store)[KEYS[1]])
    assert store.batch_get(KEYS[:2], room(2)) == [None, None]


def test_nobody_else_finds_them(store: CheckedStorage, tmp_path: Path) -> None:
    """Not with another salt, not without one; nor are pages found that were written without."""
    store.batch_set(KEYS, pages())
    other = CheckedStorage(backend(tmp_path / "store"), Pool(), SALT + "0")  # type: ignore[arg-type]
    assert (other.batch_exists(KEYS), backend(tmp_path / "store").batch_exists(KEYS)) == (0, 0)
    backend(tmp_path / "store").set("d" * 64, pages(1)[0])
    assert not store.exists("d" * 64)


class HostMemoryBackend:
    """Storage that reads and writes pages of the host tier itself, and knows pools by name."""

    def __init__(self, pool: Pool) -> None:
        self.registered_pools = {PoolName.KV: pool}
        self.kept: dict[str, bytes] = {}
        self.prefixes: list[Any] = []

    def _page(self, slot: int) -> tuple[int, int]:
        return self.registered_pools[PoolName.KV].pages.page(slot // 16).data_ptr(), LAYOUT.page_bytes

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.prefixes.append(extra_info and extra_info.prefix_keys)
        self.kept |= {
            k: ctypes.string_at(*self._page(s)) for k, s in zip(keys, host_indices[::16].tolist(), strict=True)
        }
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, slot in zip(keys, host_indices[::16].tolist(), strict=True):
            if key in self.kept:
                ctypes.memmove(self._page(slot)[0], self.kept[key], len(self.kept[key]))
        return [key in self.kept for key in keys]

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {of.name: self.batch_set_v1(of.keys or [], of.host_indices) for of in transfers}

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {of.name: self.batch_get_v1(of.keys or [], of.host_indices) for of in transfers}


@pytest.mark.parametrize("version", [1, 2])
def test_storage_that_reads_host_memory(version: int) -> None:
    pool = Pool()
    kept = HostMemoryBackend(pool)
    store = CheckedStorage(kept, pool, SALT)  # type: ignore[arg-type]
    for number, page in enumerate(pages()):
        pool.pages.set_page(number, page)
    extra = HiCacheStorageExtraInfo(prefix_keys=[KEYS[2]])

    def transfer(first_page: int) -> tuple[Any, ...]:
        slots = torch.arange(16 * first_page, 16 * first_page + 48)
        return (KEYS, slots) if version == 1 else ([PoolTransfer(PoolName.KV, host_indices=slots, keys=KEYS)],)

    def hits(result: Any) -> list[bool]:
        return result if version == 1 else result[PoolName.KV]

    assert hits(getattr(store, f"batch_set_v{version}")(*transfer(0), extra)) == [True] * 3
    assert set(kept.kept) == {store.key(key) for key in KEYS}
    assert kept.prefixes == [[store.key(KEYS[2])] if version == 1 else None]
    assert hits(getattr(store, f"batch_get_v{version}")(*transfer(5), extra)) == [True] * 3
    for number in range(3):
        assert torch.equal(pool.pages.page(number), pool.pages.page(5 + number))
    damaged = bytearray(kept.kept[store.key(KEYS[1])])
    damaged[10] ^= 1
    kept.kept[store.key(KEYS[1])] = bytes(damaged)
    del kept.kept[store.key(KEYS[2])]
    assert hits(getattr(store, f"batch_get_v{version}")(*transfer(5))) == [True, False, False]


def formats(**changes: Any) -> dict[int, LayerFormat]:
    side = replace(SideFormat(64, transform=SideTransform(torch.eye(64)[:, torch.randperm(64)])), **changes)
    return dict.fromkeys(range(2), LayerFormat(2, 64, side, side))


def test_salts_tell_apart_what_is_not_interchangeable() -> None:
    torch.manual_seed(0)
    rows = formats()
    side = rows[0].key
    config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=Qwen3Config(num_hidden_layers=2))
    args = SimpleNamespace(model_path="a", revision=None, quantization=None)
    base: dict[str, Any] = {
        "rows": rows,
        "args": args,
        "config": config,
        "heads": slice(0, 2),
        "ranks": 1,
        "page_size": 64,
    }

    def salt(**changes: Any) -> str:
        of = base | changes
        facts = model_facts(of["args"], of["config"])
        return storage_salt(
            fingerprint(of["rows"]), facts, of["heads"], of["ranks"], PageLayout.of_formats(of["rows"], of["page_size"])
        )

    def with_side(**changes: Any) -> dict[int, LayerFormat]:
        return {layer: replace(of, key=replace(side, **changes)) for layer, of in rows.items()}

    longer = Qwen3Config(num_hidden_layers=2, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    others = [
        {"rows": formats()},  # another rotation
        {"rows": with_side(group_size=32)},
        {"rows": with_side(bits=3)},
        {"rows": with_side(bits=16)},
        {"rows": with_side(scale_dtype=torch.float16)},
        {"rows": with_side(transform=replace(side.transform, gain=0.98))},  # another recipe
        {"rows": with_side(transform=replace(side.transform, clip=0.9))},
        {"args": SimpleNamespace(model_path="b", revision=None, quantization=None)},
        {"args": SimpleNamespace(model_path="a", revision="main", quantization=None)},
        {"args": SimpleNamespace(model_path="a", revision=None, quantization="fp8")},
        {"config": SimpleNamespace(dtype=torch.float16, hf_text_config=config.hf_text_config)},
        {"config": SimpleNamespace(dtype=torch.bfloat16, hf_text_config=longer)},
        {"heads": slice(0, 1)},
        {"ranks": 2},
        {"page_size": 128},
    ]
    salts = [salt(), *(salt(**changes) for changes in others)]
    assert len(set(salts)) == len(salts)
    again = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=Qwen3Config(num_hidden_layers=2))
    assert salt(config=again) == salt()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (("mooncake", "layer_first", False), "--hicache-mem-layout page_first"),
        (("aibrix", "page_first", False), "--hicache-storage-backend file or nixl or mooncake or hf3fs"),
        (("file", "page_first", True), "drop tp_lcm_size"),
    ],
)
def test_storage_that_is_attached_late_is_refused(given: tuple[str, str, bool], what: str) -> None:
    check_storage("file", "layer_first", False)
    check_storage("nixl", "page_first_direct", False)
    with pytest.raises(Int2Error, match=what):
        check_storage(*given)


def test_storage_of_other_servers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "active", lambda: None)
    assert hooks.around_create_backend(lambda *given: given[1:], None, "file", 1, 2) == ("file", 1, 2)
    assert hooks.around_get_mha_host_pool_cls(lambda source: source, "stock") == "stock"
    assert not hooks.has_storage()
