"""Pages in storage for tests: a host tier as small as storage can have, and SGLang's files."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer

from sglang_oscar.features.tiers.pages import HostPages, PageLayout
from sglang_oscar.features.tiers.storage import CheckedStorage

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


def backend(folder: Path, **extra: Any) -> HiCacheFile:
    """SGLang's files; ``extra`` is what --hicache-storage-backend-extra-config says."""
    return HiCacheFile(storage_config(extra_config=extra), str(folder))


def storage_config(**changes: Any) -> Any:
    """As much of SGLang's as its files ask for."""
    config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config |= {"model_name": "m", "is_mla_model": False, "extra_config": {}, "dcp_size": 1}
    return SimpleNamespace(**config | changes)


def checked(folder: Path) -> CheckedStorage:
    """Storage in a folder, of a host tier of its own."""
    return CheckedStorage(backend(folder), Pool(), SALT)  # type: ignore[arg-type]


def pages(count: int = 3, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (LAYOUT.page_bytes,), generator=generator).byte() for _ in range(count)]


def room(count: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(LAYOUT.page_bytes, dtype=torch.uint8) for _ in range(count)]


def files(store: CheckedStorage) -> dict[str, Path]:
    """Files by SGLang's keys."""
    return {key: Path(store.file_path, f"{store._get_suffixed_key(store.key(key))}.bin") for key in KEYS}


def damage(path: Path, how: str) -> None:
    """Flip a bit of a file's rows or of its trailer, cut it short, or empty it."""
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[random.Random(7).randrange(len(content) - LAYOUT.trailer_bytes)] ^= 4
    elif how == "trailer":
        content[-LAYOUT.trailer_bytes] ^= 1
    elif how == "truncated":
        del content[-100:]
    path.write_bytes(b"" if how == "empty" else content)


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
