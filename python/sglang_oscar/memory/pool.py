"""The history pool: SGLang's own MHA pool with self-contained INT2 rows instead of BF16 vectors."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oscar_kernels.layout import RowLayout


class Int2TokenToKVPool(MHATokenToKVPool):
    """One uint8 row per token slot, layer and side; see :mod:`oscar_kernels.layout` for its bytes.

    Allocation, eviction, moving, copying and transfer are stock, because to them a row is an ordinary vector of
    ``head_bytes`` uint8 channels per kv head.

    Args:
        size: token slots; the padding page 0 comes on top.
        layout: row geometry.
        kwargs: further arguments of MHATokenToKVPool.
    """

    def __init__(self, size: int, *, layout: RowLayout, **kwargs: Any) -> None:
        self.layout = layout
        super().__init__(size, dtype=torch.uint8, head_num=layout.kv_heads, head_dim=layout.head_bytes, **kwargs)

    def rows(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K rows and V rows of a layer, uint8 [slots, row_bytes] each."""
        index = layer_id - self.start_layer
        shape = (-1, self.layout.row_bytes)
        return self.k_buffer[index].view(shape), self.v_buffer[index].view(shape)

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Not available: only the int2 attention backend can write rows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("INT2 rows are written by the oscar attention backend")
