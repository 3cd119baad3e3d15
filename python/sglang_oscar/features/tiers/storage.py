"""Storage of pages: every key is salted on its way to SGLang's storage backend, every page is checked on its way back.
Once weights were updated the salt is this process's own, so that pages of other weights are never found.

The trailer of a page holds a digest of its key and its rows. A page that another format, model or key has written is
never asked for; one that is damaged is a miss, which ends the hit before it. Pages that hold NaN are not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sglang_oscar import metrics
from sglang_oscar.features.tiers.beside import FilesBeside
from sglang_oscar.features.tiers.finite import Column
from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.pages import plain_columns
from sglang_oscar.features.tiers.pool_files import PoolFiles
from sglang_oscar.features.tiers.signed_pages import SignedPages
from sglang_oscar.formats import origin

logger = logging.getLogger(__name__)


class CheckedStorage:
    """A storage backend of SGLang with salted keys and checked pages. What is not here is the backend's own.

    Args:
        backend: SGLang's.
        pool: the host tier whose pages are stored.
        salt: of the keys (:mod:`sglang_oscar.features.tiers.salt`).
        columns: where a page has its numbers.
    """

    def __init__(self, backend: Any, pool: Int2HostPool, salt: str, columns: Sequence[Column] = ()) -> None:
        self._backend = backend
        self._pool = pool
        self._salt = salt
        self._signed = SignedPages(pool, columns, self._damaged)
        self._rows = PoolFiles(backend, pool, columns, self._damaged, lambda key: key)
        self._drafts: dict[str, PoolFiles] = {}
        self._beside = FilesBeside(backend, self._damaged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take pages of another pool, too, which keys name from now on; of rows of drafts by their model."""
        self._backend.register_mem_host_pool_v2(host_pool, host_pool_name)
        if isinstance(host_pool, Int2HostPool) and host_pool is not self._pool:
            columns = plain_columns(host_pool.page_layout, host_pool.dtype)
            name = partial(self._backend._log_key, host_pool_name)
            self._drafts[host_pool_name] = PoolFiles(self._backend, host_pool, columns, self._damaged, name)
        elif host_pool is not self._pool:
            self._beside.add(host_pool, host_pool_name)

    def close(self) -> None:
        """End processes, once they are done, and close the backend where that can be closed: storage is detached."""
        for files in (self._rows, *self._drafts.values()):
            files.close()
        if hasattr(self._backend, "close"):
            self._backend.close()

    def key(self, key: str) -> str:
        """The key under which the backend has a page: 64 hex digits, like SGLang's own."""
        salt = " ".join(filter(None, (self._salt, self._beside.salt, origin.update())))
        return hashlib.sha256(f"{salt} {key}".encode()).hexdigest()

    @property
    def is_files(self) -> bool:
        """Whether the backend is SGLang's that keeps pages in files, which a process of their own moves."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        return isinstance(self._backend, HiCacheFile)

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
        # SGLang's index of files, where there is one, asks the operating system for nothing that it knows.
        if self.is_files and self._backend.metadata_cache is None:
            return self._rows.count(self._keys(keys))
        return int(self._backend.batch_exists(self._keys(keys), self._extra(extra_info)))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The same beside other pools."""
        if self.is_files and self._backend.metadata_cache is None and self._only_drafts(pool_transfers):
            return self._count_drafts(self._keys(keys))
        return self._backend.batch_exists_v2(self._keys(keys), self._transfers(pool_transfers), self._extra(extra_info))

    def _only_drafts(self, transfers: Any) -> bool:
        """Whether what is asked for beside rows are rows of drafts, of every page."""
        return bool(transfers) and all(of.name in self._drafts for of in transfers)

    def _count_drafts(self, salted: list[str]) -> Any:
        """Pages from the first on that are there with their drafts, asked as :meth:`batch_exists` does."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransferResult

        found = {PoolName.KV: self._rows.count(salted)}
        found |= {name: files.count(salted) for name, files in self._drafts.items()}
        pages = min(found.values())
        return PoolTransferResult(pages, found, list(range(1, pages + 1)))

    # Pages as tensors.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """A page, uint8 [page_bytes]; None where it is missing or damaged."""
        salted = self.key(key)
        try:
            page = self._backend.get(salted, target_location, target_sizes)
        except Exception as error:  # whatever a backend raises for a file that is too short
            self._damaged(salted, str(error) or type(error).__name__)
            return None
        if page is None or not self._signed.intact(salted, page):
            return None
        return page  # type: ignore[no-any-return]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Pages one by one, so that a damaged one takes no other along."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page, uint8 [page_bytes], whose trailer is written; False where it could not be stored."""
        salted = self.key(key)
        return bool(self._signed.sign([salted], [value])) and bool(
            self._backend.set(salted, value, target_location, target_sizes)
        )

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; False where one could not be stored."""
        salted = self._keys(keys)
        count = self._signed.sign(salted, values)
        given = [of and of[:count] for of in (values, target_locations, target_sizes)]
        return bool(self._backend.batch_set(salted[:count], *given)) and count == len(keys)

    # Pages of host memory.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host tier; False where one is missing or damaged, whose place then holds anything."""
        salted = self._keys(keys)
        if self.is_files:
            return self._rows.read(salted, host_indices)
        found = self._backend.batch_get_v1(salted, host_indices, self._extra(extra_info))
        return self._signed.intact_slots(salted, host_indices, found)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host tier; False where one could not be stored."""
        salted = self._keys(keys)
        if self.is_files:
            return self._rows.write(salted, host_indices)
        count = self._signed.sign_slots(salted, host_indices)
        stored = self._backend.batch_set_v1(
            salted[:count], host_indices[: count * self._pool.page_size], self._extra(extra_info)
        )
        return [*stored, *[False] * (len(keys) - count)]

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools; those of this one are checked, in files all are."""
        salted = self._transfers(transfers)
        if self.is_files:
            return {of.name: self._moved(of, PoolFiles.read, self._beside.read) for of in salted}
        results: dict[str, list[bool]] = self._backend.batch_get_v2(salted, self._extra(extra_info))
        for transfer in salted:
            if self._is_own(transfer):
                results[transfer.name] = self._signed.intact_slots(
                    transfer.keys, transfer.host_indices, results[transfer.name]
                )
        return results

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        salted, missing = self._transfers(transfers), {}
        if self.is_files:
            return {of.name: self._moved(of, PoolFiles.write, self._beside.write) for of in salted}
        for at, transfer in enumerate(salted):
            if self._is_own(transfer):
                count = self._signed.sign_slots(transfer.keys, transfer.host_indices)
                missing[transfer.name] = [False] * (len(transfer.keys) - count)
                slots = transfer.host_indices[: count * self._pool.page_size]
                salted[at] = replace(transfer, keys=transfer.keys[:count], host_indices=slots)
        stored: dict[str, list[bool]] = self._backend.batch_set_v2(salted, self._extra(extra_info))
        return {name: [*of, *missing.get(name, [])] for name, of in stored.items()}

    def _moved(
        self, of: Any, move: Callable[[PoolFiles, list[str], Any], list[bool]], beside: Callable[[Any], list[bool]]
    ) -> list[bool]:
        """Move files of a pool, whose keys are salted: those of drafts, or of another pool beside that of rows."""
        drafts = self._drafts.get(of.name)
        return beside(of) if drafts is None else move(drafts, of.keys, of.host_indices)

    def _transfers(self, transfers: list[Any] | None) -> list[Any]:
        return [replace(of, keys=None if of.keys is None else self._keys(of.keys)) for of in transfers or []]

    def _is_own(self, transfer: Any) -> bool:
        return getattr(self._backend, "registered_pools", {}).get(transfer.name) is self._pool

    # Damaged pages.

    def _damaged(self, key: str, reason: str) -> None:
        """Say so, and let the page be written anew."""
        metrics.count("damaged_pages")
        try:
            self._forget(key)
        except OSError as error:  # rights, or a folder that is read only: other pages are none the worse for it
            logger.warning(
                "int2 storage: page %s is damaged (%s) and is computed again each time, as it cannot be removed (%s); "
                "remove it, or give the server the right to", key[:12], reason, error,
            )  # fmt: skip
        else:
            logger.warning("int2 storage: page %s is damaged (%s) and is computed again", key[:12], reason)

    def _forget(self, key: str) -> None:
        """Remove a page, of a backend that can and would not overwrite it."""
        if self.is_files:
            if self._backend.metadata_cache is not None:
                self._backend.metadata_cache.remove(self._backend._get_suffixed_key(key))
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._rows.path(key))
        elif type(self._backend).__name__ == "HiCacheHF3FS":  # its module is not imported where it is not used
            for half in "kv":
                self._backend.delete(f"{key}-{half}")
