"""Rows of draft models in files, beside those of the model: a page is there with both, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.host_releases import keeps_drafts_on_the_host
from sglang_oscar.features.tiers.pages import HostPages, PageLayout
from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import KEYS, checked, damage

if not keeps_drafts_on_the_host():
    pytest.skip("draft models have no rows on the host before SGLang 0.5.23", allow_module_level=True)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

LAYOUT = PageLayout(16, ((32,), (32,)))
"""Of 16 numbers of bfloat16 a row."""


def drafts() -> Int2HostPool:
    """A host pool of eight pages of a draft model's rows."""
    pool = object.__new__(Int2HostPool)
    pool.page_layout, pool.page_size, pool.dtype = LAYOUT, LAYOUT.page_size, torch.bfloat16
    pool.pages = HostPages(LAYOUT, torch.zeros(8 * LAYOUT.page_bytes, dtype=torch.uint8), page_first=True)
    for number in range(8):
        pool.pages.page(number)[: LAYOUT.item_bytes] = number + 1
    return pool


def with_drafts(folder: Path) -> tuple[CheckedStorage, Int2HostPool]:
    store, pool = checked(folder), drafts()
    store.register_mem_host_pool_v2(store._pool, PoolName.KV)
    store.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    return store, pool


def slots(first: int) -> torch.Tensor:
    """Of three pages."""
    return torch.arange(first * 16, (first + 3) * 16)


def transfer(first: int) -> PoolTransfer:
    return PoolTransfer(PoolName.DRAFT, host_indices=slots(first), keys=KEYS, indices_from_pool=PoolName.KV)


def found(store: CheckedStorage) -> tuple[int, list[int] | None]:
    result = store.batch_exists_v2(KEYS, [transfer(0)])
    return result.kv_hit_pages, result.restorable_prefix_pages


def test_drafts_come_back_with_their_pages(tmp_path: Path) -> None:
    store, pool = with_drafts(tmp_path)
    assert store.batch_set_v2([transfer(1)]) == {PoolName.DRAFT: [True] * 3}
    assert found(store) == (0, [])
    store.batch_set_v1(KEYS, slots(0))
    assert found(store) == (3, [1, 2, 3])
    assert store.batch_get_v2([transfer(5)]) == {PoolName.DRAFT: [True] * 3}
    for number in range(3):
        rows = pool.pages.page(5 + number)[: LAYOUT.item_bytes]
        assert set(rows.tolist()) == {2 + number}


@pytest.mark.parametrize("how", ["flipped", "trailer", "truncated", "empty", "gone"])
def test_a_page_without_its_drafts_is_none(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its place stays as it was, and it is written anew."""
    store, pool = with_drafts(tmp_path)
    store.batch_set_v1(KEYS, slots(0))
    store.batch_set_v2([transfer(1)])
    (path,) = tmp_path.glob(f"{store.key(KEYS[1])}.draft*.bin")
    if how == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        if how == "flipped":
            content[70] ^= 1
        elif how == "trailer":
            content[LAYOUT.item_bytes] ^= 1
        path.write_bytes(content)
        if how in ("truncated", "empty"):
            damage(path, how)
    before = pool.pages.page(6).clone()
    assert store.batch_get_v2([transfer(5)]) == {PoolName.DRAFT: [True, False, True]}
    assert torch.equal(pool.pages.page(6), before)
    assert ("is damaged" in caplog.text) == (how != "gone")
    assert found(store) == (1, [1])
    store.batch_set_v2([transfer(1)])
    assert found(store) == (3, [1, 2, 3])


def test_drafts_that_are_no_numbers_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, pool = with_drafts(tmp_path)
    pool.pages.page(2)[: LAYOUT.item_bytes].view(torch.bfloat16)[-1] = float("nan")
    assert store.batch_set_v2([transfer(1)]) == {PoolName.DRAFT: [True, False, True]}
    assert "are not stored, as they hold NaN" in caplog.text
