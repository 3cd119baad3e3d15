"""Pages in storage: keys that only the same rows of the same model have, and damaged pages that are misses."""

from __future__ import annotations

import os
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
from sglang_oscar.attach import refusals, releases
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.tiers import hooks
from sglang_oscar.features.tiers.arguments import WithStorage, check_nameable, check_storage
from sglang_oscar.features.tiers.pages import PageLayout
from sglang_oscar.features.tiers.salt import model_facts, storage_salt
from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import (
    KEYS,
    LAYOUT,
    SALT,
    HostMemoryBackend,
    Pool,
    backend,
    checked,
    damage,
    files,
    pages,
    room,
    storage_config,
)


@pytest.fixture
def store(tmp_path: Path) -> CheckedStorage:
    return checked(tmp_path / "store")


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
    text = Qwen3Config(num_hidden_layers=2)
    config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, is_multimodal=False)

    def with_config(**changes: Any) -> SimpleNamespace:
        return SimpleNamespace(**vars(config) | changes)

    def seeing(**vision: Any) -> SimpleNamespace:
        whole = SimpleNamespace(to_dict=lambda: {"text_config": text.to_dict(), "vision_config": vision})
        return with_config(hf_config=whole, is_multimodal=True)

    def server(**changes: Any) -> SimpleNamespace:
        of = {"model_path": "a", "revision": None, "quantization": None, "download_dir": None, "load_format": "auto"}
        of["speculative_algorithm"] = None
        return SimpleNamespace(**of | changes)

    base: dict[str, Any] = {
        "rows": rows,
        "args": server(),
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
        {"args": server(model_path="b")},
        {"args": server(revision="main")},
        {"args": server(quantization="fp8")},
        *({"config": seeing(patch_size=size)} for size in (14, 16)),
        {"config": with_config(dtype=torch.float16)},
        {"config": with_config(hf_text_config=longer)},
        {"heads": slice(0, 1)},
        {"ranks": 2},
        {"page_size": 128},
    ]
    salts = [salt(), *(salt(**changes) for changes in others)]
    assert len(set(salts)) == len(salts)
    assert salt(config=with_config(hf_text_config=Qwen3Config(num_hidden_layers=2))) == salt()


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


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("enable_lora", "drop --hicache-storage-backend or --enable-lora"),
        ("lora_paths", "drop --hicache-storage-backend or --enable-lora"),
        ("remote_instance_weight_loader_start_seed_via_transfer_engine", "drop --hicache-storage-backend or --remote"),
    ],
)
def test_storage_whose_keys_would_not_name_the_weights(name: str, what: str) -> None:
    served = {
        "enable_lora": None,
        "lora_paths": None,
        "remote_instance_weight_loader_start_seed_via_transfer_engine": False,
        "speculative_algorithm": None,
    }
    check_nameable(SimpleNamespace(**served))
    with pytest.raises(Int2Error, match=what):
        check_nameable(SimpleNamespace(**served | {name: True}))
    drafting = SimpleNamespace(**served | {"speculative_algorithm": "EAGLE"})
    check_nameable(WithStorage(drafting, "file"))
    with pytest.raises(Int2Error, match="beside a draft model; set --hicache-storage-backend file"):
        check_nameable(WithStorage(drafting, "nixl"))


def test_names_of_pages_do_not_say_where_a_model_was_served_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or how it was called: their keys say which one it is, of a copy elsewhere the same."""
    monkeypatch.setattr(hooks, "active", lambda: True)
    monkeypatch.setattr("sglang_oscar.features.tiers.salt.salt_of_this_process", lambda layout: SALT)
    served = SimpleNamespace(enable_lora=None, lora_paths=None, speculative_algorithm=None)
    served.remote_instance_weight_loader_start_seed_via_transfer_engine = False
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: served)
    monkeypatch.setattr(releases, "model_config", lambda args: "the model")
    asked_rooms: list[tuple[Any, str, Any]] = []
    monkeypatch.setattr(
        refusals,
        "check_model",
        lambda model, args: asked_rooms.append((model, args.hicache_storage_backend, args.enable_lora)),
    )
    monkeypatch.setattr("sglang_oscar.features.tiers.salt.columns_of_this_process", lambda layout: [])
    monkeypatch.setattr("sglang_oscar.features.tiers.host_pool.Int2HostPool", Pool)
    configs = []

    def create(cls: Any, name: str, config: Any, pool: Any) -> Any:
        configs.append(config)
        return HiCacheFile(config, str(tmp_path))

    pool, paths = Pool(), []
    pool.layout = "page_first"  # type: ignore[attr-defined]
    for path in ("/models/a", "/mnt/b"):
        asked = storage_config(model_name=path, tp_lcm_size=None)
        store = hooks.around_create_backend(create, None, "file", asked, pool)
        paths.append(store._rows.path(store.key(KEYS[0])))
        assert asked.model_name == path
    assert paths[0] == paths[1]
    # Rooms that know the model are asked as if the server had been started with the storage.
    assert asked_rooms == [("the model", "file", None)] * 2


def test_storage_of_other_servers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "active", lambda: None)
    assert hooks.around_create_backend(lambda *given: given[1:], None, "file", 1, 2) == ("file", 1, 2)
    assert hooks.around_get_mha_host_pool_cls(lambda source: source, "stock") == "stock"
