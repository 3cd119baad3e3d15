"""The host tier's pool: SGLang's, with whole pages for items."""

from __future__ import annotations

import inspect
import logging
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from sglang_oscar.errors import Int2Error
from sglang_oscar.features.tiers import host_releases
from sglang_oscar.features.tiers.arguments import LAYOUTS
from sglang_oscar.features.tiers.pages import PAGE_FIRST, HostPages, PageLayout, host_line
from sglang_oscar.features.tiers.salt import ranks_have_other_parts
from sglang_oscar.features.tiers.transfer import KernelTransfer, TorchTransfer, device_pages

logger = logging.getLogger(__name__)


class Int2HostPool(HostKVCache):
    """Pages of INT2 rows in host memory.

    SGLang allocates, frees and evicts slots; which bytes are a slot's is decided here. It hands out whole pages in both
    directions, and rows of any sizes by layer and side come as they lie in the history pool.

    Args:
        source: what SGLang describes the device's pool by: the pool, or in newer releases its buffers.
        host_to_device_ratio: tokens on the host by tokens on the device, where host_size is 0.
        host_size: 10^9 bytes, or 0.
        page_size: tokens of a page.
        layout: SGLang's name of it.
        allocator_type: SGLang's name of what allocates host memory.
        pool_label: for SGLang's log.
        further: what releases pass besides.

    Raises:
        Int2Error: a layout that cuts rows, a size that ranks would not have alike, or caches of draft models beside
            this one.
    """

    def __init__(
        self,
        source: Any,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        *,
        allocator_type: str = "default",
        pool_label: str = "kv",
        **further: Any,
    ) -> None:
        if layout not in LAYOUTS:
            raise Int2Error(f"--hicache-mem-layout {layout} cuts rows; set --hicache-mem-layout {LAYOUTS[0]}")
        if host_size and ranks_have_other_parts():
            raise Int2Error(
                "--hicache-size holds other numbers of tokens on ranks whose kv heads have codes of their own; set "
                "--hicache-ratio instead"
            )
        # Newer releases also pass buffers for the staged copies of rows, of which there are none; and a draft model's
        # cache has a pool of its own.
        if any(further.get(name) for name in ("draft_buffer_infos", "mtp_draft_device_pools")):
            raise Int2Error("the host tier does not keep the cache of a draft model; drop --speculative-algorithm")
        keys, values = ([buffer.view(torch.uint8) for buffer in side] for side in host_releases.device_rows(source))
        rows = keys, values
        self._row_device = rows[0][0].device
        self.page_layout = PageLayout(
            page_size,
            tuple(tuple(buffer[0].numel() for buffer in side) for side in rows),  # type: ignore[arg-type]
        )
        self.layer_num = self.target_layer_num = self.page_layout.layers
        self._device_pages = device_pages(self.page_layout, rows)
        on_gpu = self._row_device.type == "cuda"
        self._transfers = {
            "kernel": KernelTransfer() if on_gpu else TorchTransfer(),
            "direct": TorchTransfer(),
        }
        super().__init__(
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=page_size,
            layout=layout,
            pin_memory=on_gpu,
            device="cpu",
            allocator_type=allocator_type,
            pool_label=pool_label,
            **host_releases.host_pool_geometry(
                inspect.signature(HostKVCache), source, self.page_layout.token_bytes, further
            ),
        )
        self.pages = HostPages(self.page_layout, self.kv_buffer, layout in PAGE_FIRST)
        logger.info("int2 memory: %s", host_line(self.size, self.page_layout))

    def get_size_per_token(self) -> int:
        """Bytes of a token over all layers."""
        return self.page_layout.token_bytes

    def get_ksize_per_token(self) -> int:
        """Bytes of a token in the first of the two objects that a page is in storage without copies."""
        return self.page_layout.token_bytes // 2

    def init_kv_buffer(self) -> torch.Tensor:
        """Host memory for all pages, one piece: uint8 [pages * page_bytes]."""
        allocate = ALLOC_MEMORY_FUNCS[self._row_device.type]
        buffer: torch.Tensor = allocate(
            (self.page_num * self.page_layout.page_bytes,),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
        )
        return buffer

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        **_: Any,
    ) -> None:
        """Copy one layer of some pages to the device, on the current stream; indices are slots, page by page."""
        numbers = self._numbers(host_indices), self._numbers(device_indices)
        self._transfers[io_backend].load(self.pages, self._device_pages, layer_id, *numbers)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy some pages to the host, on the current stream; indices are slots, page by page."""
        numbers = self._numbers(host_indices), self._numbers(device_indices)
        self._transfers[io_backend].back_up(self.pages, self._device_pages, *numbers)

    def _numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """Page numbers of slots that are whole pages.

        Raises:
            ValueError: they are not; asked of host memory only, since asking a GPU would wait for it.
        """
        numbers = self.page_layout.page_numbers(slots)
        if slots.device.type == "cpu":
            whole = numbers[:, None] * self.page_size + torch.arange(self.page_size)
            if not torch.equal(whole.flatten(), slots):
                raise ValueError("the host tier moves whole pages, and was asked for parts of some")
        return numbers

    def get_data_page(self, index: int | torch.Tensor, flat: bool = True) -> torch.Tensor:
        """The page that begins at a slot, as it goes to storage: uint8 [page_bytes]; its halves [2, page_bytes / 2]
        unless ``flat``, for storage that keeps keys and values apart.
        """
        page = self.pages.page(int(index) // self.page_size)
        return page if flat else page.view(2, -1)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for a page from storage on its way to the host tier: pinning it would take longer than reading it."""
        return torch.empty(self.page_layout.page_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int | torch.Tensor, data_page: torch.Tensor) -> None:
        """Put a page from storage where the page that begins at a slot is."""
        self.pages.set_page(int(index) // self.page_size, data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes of pages for storage that reads host memory itself.

        Such storage keeps keys and values of a page apart. A page is one piece here, so each object is a half of it.

        Raises:
            ValueError: a page is not one piece of host memory.
        """
        if not self.pages.page_first:
            raise ValueError(f"this storage needs --hicache-mem-layout {PAGE_FIRST[0]}")
        half = self.page_layout.page_bytes // 2
        begins = [self.pages.page(slot // self.page_size).data_ptr() for slot in indices[:: self.page_size].tolist()]
        return [begin + part for begin in begins for part in (0, half)], [half] * (2 * len(begins))

    def get_split_heads_page_buffer_meta(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: equal slices of a row are not heads.

        Raises:
            Int2Error: always.
        """
        raise Int2Error("rows cannot be cut by heads for ranks of another number; drop tp_lcm_size")

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Host memory that storage registers."""
        return [self.kv_buffer]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every page begins at a multiple of ``page_size_bytes``."""
        return (
            self.pages.page_first
            and self.kv_buffer.data_ptr() % page_size_bytes == 0
            and self.page_layout.page_bytes % page_size_bytes == 0
        )
