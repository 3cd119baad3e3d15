"""A layer of an INT2 cache: its tensors, and how what is in them came to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat


@dataclass(frozen=True, eq=False)
class CachedLayer:
    """Tensors of one attention layer on this rank, or of a part of one, and their format.

    ``format`` is of this rank's heads, its tensors on the device of ``cache``.
    """

    cache: LayerCache
    format: LayerFormat

    @property
    def parts(self) -> tuple[CachedLayer, ...]:
        """The layer itself."""
        return (self,)


@dataclass(frozen=True, eq=False)
class CutLayer:
    """A layer that is cut between kv heads (:class:`oscar_kernels.format.CutFormat`): a cache for every part, in the
    order of the heads."""

    parts: tuple[CachedLayer, ...]


AnyLayer = CachedLayer | CutLayer


def parts_of(layers: Iterable[AnyLayer]) -> list[CachedLayer]:
    """What has a cache of its own, of all layers."""
    return [part for layer in layers for part in layer.parts]
