"""Where the rows of a page lie in host memory and in storage, and the host's pages themselves.

A part of a layer that is cut is a layer here, as it is to SGLang. An *item* is what one layer and side has of a page:
its rows, one behind the other, as they lie in the history pool. All items of a page and then its trailer
(:mod:`sglang_oscar.features.tiers.storage`) make up the page, whatever sizes the rows of different layers and sides
have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from oscar_kernels.format import AnyFormat, parts_of
from sglang_oscar.features.tiers.digest import DIGEST_BYTES
from sglang_oscar.features.tiers.finite import Column
from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.units import Units

PAGE_VERSION = 4
"""Version of what a page holds where; part of every key of storage. Since 4 it holds no NaN."""
PAGE_FIRST = ("page_first", "page_first_direct")
"""SGLang's names of layouts in which a page is one piece of host memory; to us they are the same."""
HALF_PAGE = 4096
"""Bytes that half a page is a multiple of: storage may read and write halves, and without the file cache of the
operating system, which then asks for multiples of its pages."""


class Item(NamedTuple):
    """One layer and side of a page: ``side`` is 0 for keys and 1 for values, the rest is in bytes."""

    side: int
    layer: int
    offset: int
    size: int


@dataclass(frozen=True)
class PageLayout:
    """The bytes of a page.

    Args:
        page_size: tokens of a page.
        row_bytes: bytes of a row by layer, of keys and of values.
    """

    page_size: int
    row_bytes: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of_formats(cls, formats: Mapping[int, AnyFormat], page_size: int) -> PageLayout:
        """Of layers with these formats."""
        parts = parts_of(formats.values())
        keys = tuple(part.key_layout.row_bytes for part in parts)
        return cls(page_size, (keys, tuple(part.value_layout.row_bytes for part in parts)))

    @property
    def layers(self) -> int:
        """Layers of a page."""
        return len(self.row_bytes[0])

    @cached_property
    def groups(self) -> tuple[tuple[Item, ...], ...]:
        """All items in the order of their offsets, those of one size together: one launch copies a group.

        Where all rows have one size that is all keys by layer and then all values.
        """
        sizes = [(side, layer, rows) for side, of in enumerate(self.row_bytes) for layer, rows in enumerate(of)]
        groups, offset = [], 0
        for size in dict.fromkeys(rows for *_, rows in sizes):
            group = []
            for side, layer, rows in sizes:
                if rows == size:
                    group.append(Item(side, layer, offset, rows * self.page_size))
                    offset += group[-1].size
            groups.append(tuple(group))
        return tuple(groups)

    @property
    def items(self) -> Iterator[Item]:
        """All items in the order of their offsets."""
        return (item for group in self.groups for item in group)

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of all items."""
        return self.page_size * sum(map(sum, self.row_bytes))

    @cached_property
    def page_bytes(self) -> int:
        """All bytes of a page: two halves that fit, each of a whole number of bytes for a token."""
        unit = 2 * math.lcm(self.page_size, HALF_PAGE)
        return -(-(self.item_bytes + DIGEST_BYTES) // unit) * unit

    def page_numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """Of all slots of some pages, one page behind the other."""
        return slots[:: self.page_size] // self.page_size

    @property
    def trailer_bytes(self) -> int:
        """Bytes behind the items."""
        return self.page_bytes - self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on the host, its share of the trailer included."""
        return self.page_bytes // self.page_size


def number_columns(layout: PageLayout, formats: Iterable[AnyFormat]) -> list[Column]:
    """Where a page has its numbers: scales and zero points, or all of a side that is left exact.

    Args:
        layout: of a page.
        formats: of its layers.
    """
    rows = [(of.key_layout, of.value_layout) for of in parts_of(formats)]
    columns: dict[tuple[int, int, int], list[Column]] = {}
    for item in layout.items:
        row = rows[item.layer][item.side]
        assert row.row_bytes == layout.row_bytes[item.side][item.layer], "formats are not those of the pages"
        dtype = row.exact_dtype if row.exact else row.scale_dtype
        width, half = dtype.itemsize, int(dtype == torch.float16)
        step = width if row.exact else row.row_bytes
        for place in [0] if row.exact else range(row.params_offset, row.row_bytes, width):
            begin, of = item.offset + place + width - 1, columns.setdefault((place, step, half), [])
            if of and of[-1].end == item.offset:  # goes on from the item before
                begin = of.pop().begin
            of.append(Column(begin, item.offset + item.size, step, half))
    return [column for of in columns.values() for column in of]


def plain_columns(layout: PageLayout, dtype: torch.dtype) -> list[Column]:
    """Where a page of a draft model's rows has its numbers: they are nothing else.

    Args:
        layout: of a page.
        dtype: of the numbers.
    """
    return [Column(dtype.itemsize - 1, layout.item_bytes, dtype.itemsize, int(dtype == torch.float16))]


class PageItems(Units):
    """Pages as units: ``items`` are [pages, size] by side and layer, in the order of a page."""

    def __init__(self, items: Mapping[tuple[int, int], torch.Tensor]) -> None:
        super().__init__([item[None] for item in items.values()])
        self._items = items

    def item(self, side: int, layer: int) -> torch.Tensor:
        """Rows of one layer and side, uint8 [pages, size]."""
        return self._items[side, layer]

    def of_layer(self, layer: int) -> Units:
        """Keys and values of a layer alone."""
        return Units([self._items[side, layer][None] for side in (0, 1)])


class HostPages(PageItems):
    """Pages in host memory.

    Args:
        layout: of a page.
        buffer: uint8 [pages * page_bytes].
        page_first: whether a page is one piece of the buffer; otherwise an item of all pages is.
    """

    def __init__(self, layout: PageLayout, buffer: torch.Tensor, page_first: bool) -> None:
        self.layout = layout
        self.buffer = buffer
        self.page_first = page_first
        self.count = buffer.numel() // layout.page_bytes
        super().__init__({(item.side, item.layer): self._part(item.offset, item.size) for item in layout.items})
        self._trailers = self._part(layout.item_bytes, layout.trailer_bytes)

    def _part(self, offset: int, size: int) -> torch.Tensor:
        """[pages, size]: the same bytes of every page."""
        if self.page_first:
            return self.buffer.view(self.count, -1)[:, offset : offset + size]
        return self.buffer[offset * self.count : (offset + size) * self.count].view(self.count, size)

    def page(self, number: int) -> torch.Tensor:
        """A page, uint8 [page_bytes]: host memory itself where it is one piece, a copy otherwise."""
        if self.page_first:
            return self.buffer.view(self.count, -1)[number]
        page = torch.empty(self.layout.page_bytes, dtype=torch.uint8)
        self.copy_out([number], page.numpy()[None])
        return page

    def set_page(self, number: int, data: torch.Tensor) -> None:
        """Overwrite a page with uint8 [page_bytes]."""
        self.copy_in([number], data.numpy()[None])

    # Pages at once, by NumPy: it gives the interpreter up once for all of them, and copies in this thread alone, where
    # PyTorch would share out a copy of a megabyte among all cores and wait for the busiest.

    def copy_out(self, numbers: list[int], target: np.ndarray) -> None:
        """Copy pages to uint8 [len(numbers), page_bytes].

        Raises:
            IndexError: there is no such page.
        """
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.count:
            raise IndexError(f"pages {min(numbers)} to {max(numbers)} of {self.count}")
        for here, there in self._columns(target):
            # Straight to where it belongs, which NumPy does only in a mode that does not look at numbers.
            np.take(here, numbers, axis=0, out=there, mode="clip")

    def copy_in(self, numbers: list[int], source: np.ndarray) -> None:
        """Overwrite pages with uint8 [len(numbers), page_bytes]."""
        for here, there in self._columns(source):
            here[numbers] = there

    def _columns(self, pages: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What is one piece of a page, here and in ``pages``."""
        if self.page_first:
            yield self.buffer.view(self.count, -1).numpy(), pages
            return
        for item in self.layout.items:
            yield self.item(item.side, item.layer).numpy(), pages[:, item.offset : item.offset + item.size]
        yield self._trailers.numpy(), pages[:, self.layout.item_bytes :]


def host_line(tokens: int, layout: PageLayout) -> str:
    """The host tier in the memory account."""
    return (
        f"host tier: {tokens} tokens x {layout.token_bytes} bytes = {tokens * layout.token_bytes / GIB:.3f} GiB of "
        f"host memory, {layout.layers} layers in pages of {layout.page_bytes} bytes"
    )


def host_tokens(layout: PageLayout, gigabytes: float, ratio: float, device_tokens: int) -> int:
    """Tokens that a host tier holds.

    Args:
        layout: of a page.
        gigabytes: 10^9 bytes (--hicache-size); 0 where the ratio decides.
        ratio: of tokens on the host to tokens on the device (--hicache-ratio).
        device_tokens: of the history pool.
    """
    asked = int(gigabytes * 1e9 // layout.token_bytes) if gigabytes > 0 else int(device_tokens * ratio)
    return (asked // layout.page_size + 1) * layout.page_size
