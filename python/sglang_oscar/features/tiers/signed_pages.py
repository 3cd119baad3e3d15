"""Pages with trailers: written before a page is stored, compared once it is back. Pages that hold NaN get none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_oscar.features.tiers.digest import UNLIKE, is_intact, sign
from sglang_oscar.features.tiers.finite import Column, is_finite
from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.reports import say_endless


class SignedPages:
    """Signs and compares pages, as tensors or where they lie in the host tier.

    Args:
        pool: the host tier.
        columns: where a page has its numbers.
        damaged: told (key, why) of a page that is.
    """

    def __init__(self, pool: Int2HostPool, columns: Sequence[Column], damaged: Callable[[str, str], None]) -> None:
        self._pool = pool
        self._columns = columns
        self._damaged = damaged

    def sign(self, keys: list[str], pages: Sequence[torch.Tensor]) -> int:
        """Write the trailers of pages, uint8 [page_bytes], up to the first that holds NaN, and say how many those are:
        what lies behind would not be found without it.
        """
        endless = 0
        for at, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if not is_finite(page.numpy().data, self._columns):
                endless = len(keys) - at
                break
            sign(key, page.numpy().data, self._pool.page_layout.item_bytes)
        say_endless(endless, len(keys))
        return len(keys) - endless

    def sign_slots(self, keys: list[str], host_indices: torch.Tensor) -> int:
        """The same of pages of the host tier, whose slots ``host_indices`` has page by page."""
        slots = host_indices[:: self._pool.page_size].tolist()
        pages = [self._pool.get_data_page(slot) for slot in slots]
        count = self.sign(keys, pages)
        for slot, page in zip(slots[:count], pages, strict=False):
            self._pool.set_from_flat_data_page(slot, page)
        return count

    def intact(self, key: str, page: torch.Tensor) -> bool:
        """Whether a page is what was signed under its key."""
        if is_intact(key, page.numpy().data, self._pool.page_layout.item_bytes):
            return True
        self._damaged(key, UNLIKE)
        return False

    def intact_slots(self, keys: list[str], host_indices: torch.Tensor, found: list[bool]) -> list[bool]:
        """The same of pages of the host tier; those that were not ``found`` are not."""
        slots = host_indices[:: self._pool.page_size].tolist()
        return [
            bool(there) and self.intact(key, self._pool.get_data_page(slot))
            for key, slot, there in zip(keys, slots, found, strict=True)
        ]
