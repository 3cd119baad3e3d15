"""Decode attention of one layer over a quantized cache of random content."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from oscar_kernels.cache import BatchTables, LayerCache, Windows
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.cuda import pair
from oscar_kernels.cuda.books import arranged_book
from oscar_kernels.parts import Part, join_heads
from oscar_kernels.prepared import SplitMatrix, split_matrix
from oscar_kernels.triton import decode as triton_decode
from oscar_tools.bench.synthetic import (
    PAGE,
    WINDOWS,
    Heads,
    Layouts,
    layouts_of,
    random_cache,
    rotation_of,
    shuffled_tables,
)
from oscar_tools.bench.timing import device, layers_of, time_us

KERNELS: dict[str, ModuleType] = {"cuda": cuda_decode, "triton": triton_decode}


def rows_of(kernel: str, heads: Heads) -> Layouts:
    """What a kernel reads: rows of 2 bits unless widths follow its name, such as ``cuda:k3v2``."""
    return layouts_of(kernel.partition(":")[2] or "k2v2", heads.kv, heads.head_dim)


def parts_of(kernel: str, heads: Heads) -> list[tuple[str, Heads]]:
    """Kernel and heads of every part of a layer: of widths with a plus between them, such as ``cuda:k3v2+k2bv2s``, each
    is that of as many kv heads."""
    name, _, widths = kernel.partition(":")
    parts = widths.split("+")
    if heads.kv % len(parts):
        raise ValueError(f"{heads.kv} kv heads do not make {len(parts)} equal parts")
    own = Heads(heads.query // len(parts), heads.kv // len(parts), heads.head_dim)
    return [(f"{name}:{part}" if part else name, own) for part in parts]


def kernel_bytes(kernel: str, heads: Heads, batch: int, length: int) -> int:
    """Bytes of cache that one layer's decode has to read."""
    return sum(read_bytes(batch, length, rows_of(*part)) for part in parts_of(kernel, heads))


def read_bytes(batch: int, length: int, layouts: Layouts) -> int:
    """Bytes of cache that one layer's decode has to read, whose heads are stored alike."""
    window = WINDOWS.sink + WINDOWS.recent
    rows = sum(layout.row_bytes for layout in layouts)
    exact = 2 * layouts[0].kv_heads * layouts[0].head_dim * 2
    return batch * ((length - window) * rows + window * exact)


def served_by(heads: Heads, widths: str = "k2v2") -> str:
    """The kernel that a server decodes with on this card: ``cuda`` or ``triton``."""
    cache = random_cache(PAGE, 1, layouts_of(widths, heads.kv, heads.head_dim), WINDOWS)
    return "triton" if cuda_decode.unsupported(cache, PAGE, heads.query, torch.bfloat16, 256) else "cuda"


def make_workspace(kernel: str, cache: LayerCache, q_heads: int, requests: int, drafts: int = 0) -> torch.Tensor:
    """What a kernel needs besides its inputs, shared by all layers; ``drafts`` are new tokens that are verified."""
    if kernel.startswith("cuda"):
        return cuda_decode.make_workspace(cache, q_heads, requests, drafts)
    return torch.empty(triton_decode.workspace_numel(cache, q_heads, requests, drafts=drafts), device=device())


def readings_of(kernel: str, heads: Heads, layers: int) -> list[SplitMatrix | None]:
    """What a kernel multiplies outputs by, as servers do: of every layer its own, and in the order that it reads."""
    made = [split_matrix(rotation_of(heads.head_dim), torch.bfloat16) for _ in range(layers)]
    return [cuda_decode.arrange_reading(one) for one in made] if kernel.startswith("cuda") else list(made)


def queries(requests: int, heads: Heads) -> torch.Tensor:
    """BF16 [requests, query heads, head_dim]."""
    return torch.randn(requests, heads.query, heads.head_dim, device=device()).bfloat16()


def caches_of(
    batch: int, length: int, layouts: Layouts, windows: Windows = WINDOWS, layers: int | None = None
) -> tuple[BatchTables, list[LayerCache]]:
    """Tables of requests, and a cache for every layer of a graph: as many as a graph has, or so many."""
    layers = layers_of(read_bytes(batch, length, layouts)) if layers is None else layers
    tables, slots = shuffled_tables([length] * batch, PAGE)
    caches = [random_cache(slots, batch, layouts, windows, seed) for seed in range(layers)]
    for cache in caches:
        if cache.k_codebook is not None:
            arranged_book(cache.k_codebook)  # as in servers, before a graph that would copy it at every replay
    return tables, caches


def decode_us(kernel: str, heads: Heads, batch: int, length: int) -> float:
    """Microseconds of one layer, whose outputs are multiplied, decoded as servers do, two parts by one launch where the
    CUDA kernel can; every layer of a graph has a cache of its own."""
    name, q = kernel.partition(":")[0], queries(batch, heads)
    layers = layers_of(kernel_bytes(kernel, heads, batch, length))
    cut: list[list[Part]] = [[] for _ in range(layers)]
    parts, workspaces = parts_of(kernel, heads), []
    for (part, own), queries_of_part in zip(parts, q.chunk(len(parts), 1), strict=True):
        tables, caches = caches_of(batch, length, rows_of(part, own), layers=layers)
        # In servers a part's queries come out of its store.
        queried = queries_of_part.contiguous()
        workspaces.append(make_workspace(part, caches[0], own.query, batch))
        for of, cache, reading in zip(cut, caches, readings_of(part, own, layers), strict=True):
            of.append(Part(cache, queried, None, reading))
    outs = [torch.empty_like(part.q_rot) for part in cut[0]]

    def attend(of: list[Part]) -> torch.Tensor:
        if name == "cuda" and len(of) == 2:
            return pair.attend((of[0], of[1]), tables, None, heads.sm_scale, (workspaces[0], workspaces[1]))
        return join_heads(
            KERNELS[name].decode(one.cache, tables, one.q_rot, heads.sm_scale, out, workspace, reading=one.reading)
            for one, out, workspace in zip(of, outs, workspaces, strict=True)
        )

    return time_us([partial(attend, of) for of in cut])
