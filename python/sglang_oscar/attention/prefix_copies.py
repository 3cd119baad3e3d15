"""Which kernel turns cached prefixes into 16 bits on a GPU: CUDA C++ on Hopper, Triton otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oscar_kernels.cache import BatchTables, LayerCache
from oscar_kernels.cuda import prefix
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.layout import RowLayout
from oscar_kernels.spans import Spans
from oscar_kernels.triton.prefix import copy_prefixes


class PrefixCopies:
    """A :class:`oscar_kernels.ragged_extend.CopyPrefixes`: Triton's until :meth:`arrange` finds rows for CUDA's."""

    def __init__(self) -> None:
        self._by_cuda: dict[tuple[RowLayout, RowLayout], Variant] = {}

    def arrange(self, caches: Iterable[LayerCache], page_size: int, dtype: torch.dtype) -> list[Variant]:
        """Have the CUDA kernel read what it can.

        Args:
            caches: of layers.
            page_size: tokens of a page.
            dtype: of the copies.

        Returns:
            what the kernel must be built for.
        """
        for cache in caches:
            variant = prefix.variant_of(cache, page_size, dtype)
            if prefix.unsupported(variant) is None:
                self._by_cuda[cache.k_layout, cache.v_layout] = variant
        return list(self._by_cuda.values())

    def __call__(
        self, cache: LayerCache, tables: BatchTables, spans: Spans, k_out: torch.Tensor, v_out: torch.Tensor
    ) -> None:
        """See :func:`oscar_kernels.triton.prefix.copy_prefixes`."""
        cuda = (cache.k_layout, cache.v_layout) in self._by_cuda
        copy = prefix.copy_prefixes if cuda else copy_prefixes
        copy(cache, tables, spans, k_out, v_out)
