"""One layer of an INT2 cache: its tensors, and how what is in them came to be."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat


@dataclass(frozen=True, eq=False)
class CachedLayer:
    """Tensors of one attention layer on this rank and their format.

    ``format`` is of this rank's heads, its tensors on the device of ``cache``.
    """

    cache: LayerCache
    format: LayerFormat
