"""Which kernel stores chunks of prompts and large decode steps on a GPU: CUDA C++ on Hopper, Triton otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from oscar_kernels.cache import Copies, StoreSlots
from oscar_kernels.cuda import prompt
from oscar_kernels.prepared import PreparedLayer
from oscar_kernels.triton.store import store
from sglang_oscar.memory.layer import CachedLayer


class PromptStore:
    """Args:
    prepared: transforms of the layers, by their ``id``.
    page_size: tokens of a page.
    """

    def __init__(self, prepared: Mapping[int, PreparedLayer], page_size: int) -> None:
        self._prepared = prepared
        self._page_size = page_size
        self._arranged: dict[int, prompt.PromptLayer] = {}

    def arrange(self, layers: Iterable[tuple[CachedLayer, int]], dtype: torch.dtype) -> list[prompt.Kind]:
        """Have the CUDA kernel store what it can.

        Args:
            layers: and how many query heads each has.
            dtype: of keys, values and queries.

        Returns:
            what the kernel must be built for.
        """
        kinds = []
        for layer, q_heads in layers:
            if prompt.unsupported(layer.cache) is None:
                arranged = prompt.arrange(self._prepared[id(layer)], q_heads, self._page_size)
                self._arranged[id(layer)] = arranged
                kinds.append(prompt.kind_of(layer.cache, arranged, dtype))
        return kinds

    def made_of(
        self, layer: CachedLayer, prepared: PreparedLayer
    ) -> Iterator[tuple[prompt.PromptLayer, prompt.PromptLayer]]:
        """What the CUDA kernel reads of a layer, beside what it would read of other transforms."""
        if (old := self._arranged.get(id(layer))) is not None:
            yield old, prompt.arrange(prepared, old.q_heads, self._page_size)

    def __call__(
        self,
        layer: CachedLayer,
        slots: StoreSlots,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor | None = None,
        copies: Copies | None = None,
    ) -> torch.Tensor | None:
        """See :func:`oscar_kernels.triton.store.store`."""
        arranged = self._arranged.get(id(layer))
        if arranged is None or not prompt.fits(k, v, *([] if q is None else [q])):
            return store(layer.cache, slots, k, v, self._prepared[id(layer)], q=q, copies=copies)
        return prompt.store(layer.cache, slots, k, v, arranged, q, copies)
