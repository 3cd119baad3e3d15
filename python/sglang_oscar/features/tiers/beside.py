"""Pages of other pools than that of rows in SGLang's files: states of hybrid models, with the windows beside them.

A page is a file of its own: all that SGLang's pool has of it, and a digest of its key and its bytes. States of which a
number is not finite are not told apart: rows of the same tokens are not finite either and are not stored, and nothing
is found without its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_oscar.features.tiers.digest import DIGEST_BYTES, UNLIKE, is_intact, sign


class FilesBeside:
    """Reads and writes pages of a pool beside that of rows, one by one.

    Args:
        backend: SGLang's files.
        damaged: told (name of a page, why) of one that is, to remove it.
    """

    def __init__(self, backend: Any, damaged: Callable[[str, str], None]) -> None:
        self._backend = backend
        self._damaged = damaged
        self._kinds: dict[str, list[list[Any]]] = {}

    @property
    def salt(self) -> str:
        """What pages of these pools are: dtypes and shapes of their tensors, as text; empty where there is no pool."""
        return json.dumps(self._kinds, sort_keys=True) if self._kinds else ""

    def add(self, pool: Any, name: Any) -> None:
        """Take pages of one of SGLang's host pools from now on."""
        self._kinds[str(name.value)] = [[str(part.dtype), *part.shape] for part in pool._iter_page_tensors(0)]

    def write(self, transfer: Any) -> list[bool]:
        """Store pages of SGLang's PoolTransfer, whose keys are salted; False where one could not be stored."""
        pool = self._backend.registered_pools[transfer.name]
        return [self._write(name, pool, slot) for name, slot in self._pages(transfer, pool)]

    def read(self, transfer: Any) -> list[bool]:
        """Read pages into their pool on the host; False where one is missing or damaged, whose place is untouched."""
        pool = self._backend.registered_pools[transfer.name]
        return [self._read(name, pool, slot) for name, slot in self._pages(transfer, pool)]

    def _pages(self, transfer: Any, pool: Any) -> list[tuple[str, int]]:
        """Names as SGLang looks for them, and where each page begins in its pool."""
        names = [self._backend._log_key(transfer.name, key) for key in transfer.keys]
        return list(zip(names, transfer.host_indices[:: pool.page_size].tolist(), strict=True))

    def _write(self, name: str, pool: Any, slot: int) -> bool:
        if self._backend.exists(name):
            return True
        data = pool.get_data_page(slot)
        page = torch.cat([data, torch.empty(DIGEST_BYTES, dtype=torch.uint8)])
        sign(name, _bytes(page), len(data))
        return bool(self._backend.set(name, page))

    def _read(self, name: str, pool: Any, slot: int) -> bool:
        size = pool.page_size * pool.get_size_per_token()
        page = torch.empty(size + DIGEST_BYTES, dtype=torch.uint8)
        try:
            if self._backend.get(name, page) is None:
                return False
        except OSError as error:  # it is too short, or cannot be read
            self._damaged(name, str(error))
            return False
        if not is_intact(name, _bytes(page), size):
            self._damaged(name, UNLIKE)
            return False
        pool.set_from_flat_data_page(slot, page[:size])
        return True


def _bytes(page: torch.Tensor) -> memoryview:
    array: np.ndarray = page.numpy()
    return array.data
