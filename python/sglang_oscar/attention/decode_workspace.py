"""How much decode and verification take beside the cache: known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.cuda.books import copies_bytes
from oscar_kernels.format import AnyFormat, parts_of
from oscar_kernels.prepared import TERMS
from sglang_oscar.attention.decode_choice import DecodeTask
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.part import Part
from sglang_oscar.memory.plan import MemoryPlan


@dataclass(frozen=True)
class DecodeWorkspace(Part):
    """What decode and verification need beside the cache, allocated once.

    ``partial_bytes`` says how much partial results of a step of so many requests take; ``request_bytes`` are those of a
    request in the tables of a step, and ``matrix_bytes`` those of all rotations, as files have them and as kernels read
    them.
    """

    partial_bytes: Callable[[int], int]
    request_bytes: int
    matrix_bytes: int

    name = "the workspace of decode"

    def fixed_bytes(self, requests: int) -> int:
        """All of it, for steps of up to so many requests."""
        return self.partial_bytes(requests) + requests * self.request_bytes + self.matrix_bytes

    def lines(self, plan: MemoryPlan, tokens: int) -> list[str]:
        """For the start-up account."""
        requests = plan.requests
        partial, tables = self.partial_bytes(requests), requests * self.request_bytes
        return [
            f"decode workspace: {self.fixed_bytes(requests) / GIB:.3f} GiB (partial results {partial / GIB:.3f}, "
            f"tables {tables / GIB:.3f}, rotations {self.matrix_bytes / GIB:.3f})"
        ]


def decode_workspace(task: DecodeTask, formats: Mapping[int, AnyFormat], context: int, ranks: int) -> DecodeWorkspace:
    """What GPU kernels take.

    Args:
        task: what decode has to do, on caches of :func:`without_rows`.
        formats: of the layers on this rank.
        context: tokens of a request at most.
        ranks: that attention is split over; steps are filled up to a multiple of them.
    """

    def partial_bytes(requests: int) -> int:
        return 4 * task.workspace_numel(-(-requests // ranks) * ranks)

    # See DecodeTables: a page table, four numbers, and two slots and a word for every new token.
    tables = 4 * -(-context // task.page_size) + 16 + 24 * max(task.drafts, 1)
    return DecodeWorkspace(partial_bytes, tables, matrix_bytes(formats, task.dtype))


def without_rows(geometry: Geometry, device: str) -> list[LayerCache]:
    """A cache that holds nothing for every kind of rows."""
    rows = torch.empty(0, dtype=torch.uint8, device=device)
    window = torch.empty(0, dtype=geometry.window_dtype, device=device)
    kinds = dict.fromkeys((part.key_layout, part.value_layout) for part in parts_of(geometry.formats.values()))
    return [LayerCache(*kind, geometry.windows, rows, rows, window, window, window, window) for kind in kinds]


def matrix_bytes(formats: Mapping[int, AnyFormat], dtype: torch.dtype) -> int:
    """Bytes of the matrices of all layers: in float32, in terms of 16 bits, and in those once more in the order of the
    CUDA kernel; and of codebooks, as files have them and as both CUDA kernels read them.
    """
    terms = 2 * TERMS.get(dtype, max(TERMS.values()))
    total = 0
    for layer in parts_of(formats.values()):
        for side in (layer.key.transform, layer.value.transform):
            own = [x for x in (side.matrix, side.dual) if x is not None]
            total += sum(x.numel() * (4 + 2 * terms) for x in own)
            total += 0 if side.center is None else 8 * side.center.numel()  # in either basis
        if (value := layer.value.transform.matrix) is not None:
            total += value.numel() * (4 + terms)  # what outputs are multiplied by
        if (book := layer.key.codebook) is not None:
            total += book.points.nbytes + book.factor.nbytes + copies_bytes(book)
    return total
