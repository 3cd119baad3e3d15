"""The history pool: SGLang's own MHA pool with self-contained INT2 rows instead of BF16 vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oscar_kernels.format import AnyFormat, parts_of
from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.owned import Owned
from sglang_oscar.memory.saver import kv_region


class Int2TokenToKVPool(MHATokenToKVPool):
    """One uint8 row per token slot, layer and side; see :mod:`oscar_kernels.layout` for its bytes.

    Allocation, eviction, moving, copying and transfer are stock, because to them a row is an ordinary vector of
    ``head_bytes`` uint8 channels per kv head; how many may differ from layer to layer and between keys and values. A
    part of a layer that is cut is a layer to them.

    Args:
        size: token slots; the padding page 0 comes on top.
        formats: of the layers, by global layer id.
        kwargs: further arguments of MHATokenToKVPool.
    """

    def __init__(self, size: int, *, formats: Mapping[int, AnyFormat], **kwargs: Any) -> None:
        self.formats = formats
        numbers, parts = iter(range(1 << 30)), parts_of(formats.values())
        self._index = {layer_id: [next(numbers) for _ in layer.parts] for layer_id, layer in formats.items()}
        first = parts[0]
        super().__init__(
            size,
            dtype=torch.uint8,
            head_num=first.kv_heads,
            head_dim=first.key_layout.head_bytes,
            v_head_dim=first.value_layout.head_bytes,
            layer_num=len(parts),
            **kwargs,
        )
        if torch.device(self.device).type == "cpu":
            # SGLang's copy kernel is a GPU's.
            self.use_native_move_kv_cache = True

    def _init_kv_copy_and_warmup(self) -> None:
        """Stock, on a GPU, for the widest row of any layer; a CPU copies in torch."""
        if torch.device(self.device).type == "cpu":
            self._kv_copy_config: Any = None
            return
        super()._init_kv_copy_and_warmup()
        # Stock asks the keys of the first layer how wide a row is; the kernel stops at the end of each buffer's own.
        config: dict[str, int] = self._kv_copy_config
        config["byte_tiles"] = -(-int(self.data_strides.max()) // config["bytes_per_tile"])

    def _create_buffers_normal(self) -> None:
        """Stock, but for the size of rows, which is each part's own."""
        parts = parts_of(self.formats.values())
        in_pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with kv_region(self), in_pool:
            self.k_buffer, self.v_buffer = (
                [
                    torch.zeros(
                        (self.size + self.page_size, layout.kv_heads, layout.head_bytes),
                        dtype=torch.uint8,
                        device=self.device,
                    )
                    for layout in layouts
                ]
                for layouts in ([part.key_layout for part in parts], [part.value_layout for part in parts])
            )

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """What a prefill or decode server registers: stock takes all rows to be as wide as those of the first layer.

        Returns:
            addresses, bytes, and bytes of a page, of the keys of all layers and then of their values.
        """
        buffers = [*self.k_buffer, *self.v_buffer]
        pages = [buffer[0].nbytes * self.page_size for buffer in buffers]
        return [buffer.data_ptr() for buffer in buffers], [buffer.nbytes for buffer in buffers], pages

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Any:
        """What a retracted request takes along to the host. Stock waits for the step under way, which may write to it.
        Older releases do not say its seat; ``indices`` are a view of its line of the request pool's table.
        """
        return super().get_cpu_copy(indices), self._owned(indices, req_pool_index).save()

    def load_cpu_copy(
        self, copies: Any, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        """Put it where the request lies now."""
        super().load_cpu_copy(copies[0], indices)
        self._owned(indices, req_pool_index).load(copies[1])

    def _owned(self, slots: torch.Tensor, seat: int | None) -> Owned:
        cache = cache_of(self)
        assert cache is not None
        table = cache.req_to_token_pool.req_to_token
        return cache.owned(releases.seat_of_slots(slots, table) if seat is None else seat, len(slots))

    def rows(self, layer_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K rows and V rows of a layer's parts, uint8 [slots, row_bytes] each."""
        return [(self.k_buffer[part].flatten(1), self.v_buffer[part].flatten(1)) for part in self._index[layer_id]]

    def numbers(self, layer_id: int) -> Sequence[int]:
        """Of a layer's parts among those of all layers here."""
        return self._index[layer_id]

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Not available: only the int2 attention backend can write rows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("INT2 rows are written by the oscar attention backend")
