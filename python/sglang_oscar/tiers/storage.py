"""Storage of pages: every key is salted on its way to SGLang's storage backend, every page is checked on its way back.

The trailer of a page holds a digest of its key and its rows. A page that another format, model or key has written is
never asked for; one that is damaged is a miss, which ends the hit before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import xxhash

from sglang_oscar.tiers.host_pool import Int2HostPool
from sglang_oscar.tiers.pages import DIGEST_BYTES

logger = logging.getLogger(__name__)
THREADS = 16
"""That read files of pages at once, and as many others that write them: a hit must not wait for pages that are written.

However few cores there are: a thread gives the interpreter up with every call of the operating system, and beside a
scheduler that never rests it has it back after 5 ms. One thread alone writes 60 MB/s so, 16 write 500."""


class CheckedStorage:
    """A storage backend of SGLang with salted keys and checked pages. What is not here is the backend's own.

    Args:
        backend: SGLang's.
        pool: the host tier whose pages are stored.
        salt: of the keys (:mod:`sglang_oscar.tiers.salt`).
    """

    def __init__(self, backend: Any, pool: Int2HostPool, salt: str) -> None:
        self._backend = backend
        self._pool = pool
        self._salt = salt
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="int2-storage-read")
        self._writers = ThreadPoolExecutor(THREADS, thread_name_prefix="int2-storage-write")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        """End the threads, once they are done, and close the backend where that can be closed: storage is detached."""
        self._readers.shutdown()
        self._writers.shutdown()
        if hasattr(self._backend, "close"):
            self._backend.close()

    def key(self, key: str) -> str:
        """The key under which the backend has a page: 64 hex digits, like SGLang's own."""
        return hashlib.sha256(f"{self._salt} {key}".encode()).hexdigest()

    @property
    def _folder(self) -> str | None:
        """Where SGLang's file backend has its pages, which several threads may ask at once; None of another backend."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        return self._backend.file_path if isinstance(self._backend, HiCacheFile) else None

    def _keys(self, keys: list[str]) -> list[str]:
        return [self.key(key) for key in keys]

    def _extra(self, extra_info: Any) -> Any:
        """SGLang's further information, with the keys in it salted."""
        if extra_info is None or extra_info.prefix_keys is None:
            return extra_info
        return replace(extra_info, prefix_keys=self._keys(extra_info.prefix_keys))

    # Whether pages are there.

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return bool(self._backend.exists(self.key(key)))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on are there."""
        return int(self._backend.batch_exists(self._keys(keys), self._extra(extra_info)))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The same beside other pools."""
        return self._backend.batch_exists_v2(self._keys(keys), self._transfers(pool_transfers), self._extra(extra_info))

    # Pages as tensors.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """A page, uint8 [page_bytes]; None where it is missing or damaged."""
        salted = self.key(key)
        try:
            page = self._backend.get(salted, target_location, target_sizes)
        except Exception as error:  # whatever a backend raises for a file that is too short
            self._damaged(salted, str(error) or type(error).__name__)
            return None
        if page is None or not self._intact(salted, page):
            return None
        return page  # type: ignore[no-any-return]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Pages one by one, so that a damaged one takes no other along; files several at a time."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        each = self._readers.map if self._folder is not None else map
        return list(each(self.get, keys, targets))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page, uint8 [page_bytes], whose trailer is written."""
        salted = self.key(key)
        self._sign(salted, value)
        return bool(self._backend.set(salted, value, target_location, target_sizes))

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages, files several at a time; False where one could not be stored."""
        if self._folder is not None:
            # All are waited for, also behind one that failed: their host memory may be given away afterwards.
            pairs = zip(keys, values, strict=True)
            return all(list(self._writers.map(lambda pair: self.set(*pair), pairs)))
        salted = self._keys(keys)
        for key, value in zip(salted, values, strict=True):
            self._sign(key, value)
        return bool(self._backend.batch_set(salted, values, target_locations, target_sizes))

    # Pages that the backend reads and writes in host memory.

    @property
    def reads_in_place(self) -> bool:
        """Whether :meth:`batch_get_v1` reads files straight into host memory, where a page is one piece of it."""
        return self._folder is not None and self._pool.pages.page_first

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host tier; False where one is missing or damaged, whose place then holds anything."""
        if self.reads_in_place:
            places = map(self._pool.get_data_page, host_indices[:: self._pool.page_size].tolist())
            return [page is not None for page in self._readers.map(self.get, keys, places)]
        salted = self._keys(keys)
        found = self._backend.batch_get_v1(salted, host_indices, self._extra(extra_info))
        return self._checked(salted, host_indices, found)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host tier."""
        salted = self._keys(keys)
        self._sign_all(salted, host_indices)
        return self._backend.batch_set_v1(salted, host_indices, self._extra(extra_info))  # type: ignore[no-any-return]

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools; those of this one are checked."""
        salted = self._transfers(transfers)
        results: dict[str, list[bool]] = self._backend.batch_get_v2(salted, self._extra(extra_info))
        for transfer in salted:
            if self._is_own(transfer):
                results[transfer.name] = self._checked(transfer.keys, transfer.host_indices, results[transfer.name])
        return results

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        salted = self._transfers(transfers)
        for transfer in salted:
            if self._is_own(transfer):
                self._sign_all(transfer.keys, transfer.host_indices)
        return self._backend.batch_set_v2(salted, self._extra(extra_info))  # type: ignore[no-any-return]

    def _transfers(self, transfers: list[Any] | None) -> list[Any]:
        return [replace(of, keys=None if of.keys is None else self._keys(of.keys)) for of in transfers or []]

    def _is_own(self, transfer: Any) -> bool:
        return getattr(self._backend, "registered_pools", {}).get(transfer.name) is self._pool

    # Digests.

    def _sign_all(self, keys: list[str], host_indices: torch.Tensor) -> None:
        for key, slot in zip(keys, host_indices[:: self._pool.page_size].tolist(), strict=True):
            page = self._pool.get_data_page(slot)
            self._sign(key, page)
            self._pool.set_from_flat_data_page(slot, page)

    def _sign(self, key: str, page: torch.Tensor) -> None:
        """Write the trailer of a page."""
        rows, trailer = self._parts(page)
        trailer[:] = digest(key, rows).ljust(len(trailer), b"\0")

    def _checked(self, keys: list[str], host_indices: torch.Tensor, found: list[bool]) -> list[bool]:
        slots = host_indices[:: self._pool.page_size].tolist()
        return [
            bool(there) and self._intact(key, self._pool.get_data_page(slot))
            for key, slot, there in zip(keys, slots, found, strict=True)
        ]

    def _intact(self, key: str, page: torch.Tensor) -> bool:
        rows, trailer = self._parts(page)
        if trailer[:DIGEST_BYTES] == digest(key, rows):
            return True
        self._damaged(key, "its digest is not that of its bytes")
        return False

    def _parts(self, page: torch.Tensor) -> tuple[memoryview, memoryview]:
        """Rows and trailer of a page. No tensors: every operation of PyTorch would give the interpreter up."""
        whole, size = page.numpy().data, self._pool.page_layout.item_bytes
        return whole[:size], whole[size:]

    def _damaged(self, key: str, reason: str) -> None:
        """Say so, and let the page be written anew."""
        logger.warning("int2 storage: page %s is damaged (%s) and is computed again", key[:12], reason)
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Remove a page, of a backend that can and would not overwrite it."""
        if self._folder is not None:
            name = self._backend._get_suffixed_key(key)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self._folder, f"{name}.bin"))
            if self._backend.metadata_cache is not None:
                self._backend.metadata_cache.remove(name)
        elif type(self._backend).__name__ == "HiCacheHF3FS":  # its module is not imported where it is not used
            for half in "kv":
                self._backend.delete(f"{key}-{half}")


def digest(key: str, rows: memoryview) -> bytes:
    """Digest of a page under its key: against damage and mix-ups, not against forgers. A cryptographic one, at 1 GB/s,
    would take longer than reading the page.

    Args:
        key: as the backend has it.
        rows: bytes of a page without its trailer.
    """
    return xxhash.xxh3_128_digest(rows, seed=int(key[:16], 16))
