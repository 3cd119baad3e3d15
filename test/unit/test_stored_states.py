"""Pages of pools beside that of rows in files: keys that name what they are, and digests behind them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_oscar.attach import releases
from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import KEYS, SALT, checked, damage, pages

if not releases.carries_slot_states():
    pytest.skip("states have nothing beside them on the host before SGLang 0.5.22", allow_module_level=True)
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost


def states(windows: int = 3, dtype: torch.dtype = torch.float32) -> MambaPoolHost:
    """SGLang's host pool of eight states, with windows beside them."""
    pool = object.__new__(MambaPoolHost)
    pool.page_size, pool.layout, pool.device, pool.pin_memory = 1, "page_first", "cpu", False
    pool.temporal_buffer, pool.conv_buffer = torch.rand(8, 2, 5), [torch.rand(8, 2, 3).to(dtype)]
    pool.slot_state_device_tensors = pool.slot_state_buffers = (torch.rand(8, windows, 2).bfloat16(),)
    pool.size_per_token = sum(part.nbytes for part in pool._iter_page_tensors(0))
    pool.get_size_per_token = lambda: pool.size_per_token  # type: ignore[method-assign]
    return pool


def with_states(folder: Path) -> tuple[CheckedStorage, MambaPoolHost]:
    store, pool = checked(folder), states()
    store.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    return store, pool


def transfer(key: str, slot: int) -> PoolTransfer:
    return PoolTransfer(
        PoolName.MAMBA, host_indices=torch.tensor([slot]), keys=[key], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def found(store: CheckedStorage) -> int:
    return store.batch_exists_v2(KEYS, [transfer("placeholder", 0)]).kv_hit_pages


def test_states_come_back_and_end_a_hit(tmp_path: Path) -> None:
    """A hit ends behind a page with a state; the state comes back with what lies beside it."""
    store, pool = with_states(tmp_path)
    store.batch_set(KEYS, pages())
    assert found(store) == 0
    assert store.batch_set_v2([transfer(KEYS[1], 2)]) == {PoolName.MAMBA: [True]}
    assert store.batch_set_v2([transfer(KEYS[1], 3)]) == {PoolName.MAMBA: [True]}  # is there, and stays
    assert found(store) == 2
    assert store.batch_get_v2([transfer(KEYS[1], 5)]) == {PoolName.MAMBA: [True]}
    for part, other in zip(pool._iter_page_tensors(2), pool._iter_page_tensors(5), strict=True):
        assert torch.equal(part, other)
    assert store.batch_get_v2([transfer(KEYS[2], 5)]) == {PoolName.MAMBA: [False]}


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty"])
def test_damaged_states_are_missed(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The place stays as it was, and the page is written anew."""
    store, pool = with_states(tmp_path)
    store.batch_set(KEYS, pages())
    store.batch_set_v2([transfer(KEYS[0], 2)])
    (path,) = tmp_path.glob("*.mamba*.bin")
    if how == "flipped":
        content = bytearray(path.read_bytes())
        content[-20] ^= 1  # of the windows
        path.write_bytes(content)
    else:
        damage(path, how)
    before = pool.get_data_page(5)
    assert store.batch_get_v2([transfer(KEYS[0], 5)]) == {PoolName.MAMBA: [False]}
    assert torch.equal(pool.get_data_page(5), before)
    assert "is damaged" in caplog.text
    assert (path.exists(), found(store)) == (False, 0)
    store.batch_set_v2([transfer(KEYS[0], 2)])
    assert found(store) == 1


def test_keys_name_what_lies_beside_rows(tmp_path: Path) -> None:
    """Other windows or states are other keys; keys of models that have none stay as they were."""

    def key(*beside: Any) -> str:
        store = checked(tmp_path)
        store.register_mem_host_pool_v2(store._pool, PoolName.KV)
        for pool in beside:
            store.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        return store.key(KEYS[0])

    keys = [key(states()), key(states()), key(states(windows=4)), key(states(dtype=torch.bfloat16)), key()]
    assert len(set(keys)) == 4
    assert keys[0] == keys[1]
    assert keys[-1] == hashlib.sha256(f"{SALT} {KEYS[0]}".encode()).hexdigest()
