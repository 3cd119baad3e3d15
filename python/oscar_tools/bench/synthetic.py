"""Caches of random content, tables of requests on random pages, and the shape of a model's attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from oscar_kernels.cache import BatchTables, LayerCache, Windows
from oscar_kernels.codebook import GROUP, POINTS, Codebook
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC, RowLayout
from oscar_kernels.transform import SideTransform
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_tools.bench.timing import device, layers_of

PAGE = 64
"""Tokens of a page of every cache."""
WINDOWS = Windows(64, 256, 256)


def random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages of a stock cache; converted some at a time, because a copy in BF16 might not fit beside it."""
    pages = torch.empty(shape, device=device(), dtype=dtype)
    for some in pages.split(4096):
        some.copy_(torch.randn(some.shape, device=device(), dtype=torch.bfloat16))
    return pages


class Heads(NamedTuple):
    """What one layer's attention of a model looks like on one GPU."""

    query: int
    kv: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Query heads, kv heads and head_dim with an x between them; head_dim is 128 where it is left out."""
        query, kv, *rest = (int(part) for part in text.split("x"))
        return cls(query, kv, *rest or [128])

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by."""
        return float(self.head_dim**-0.5)


QWEN3_8B = Heads(32, 8, 128)
Layouts = tuple[RowLayout, RowLayout]
"""Rows of keys and of values."""
CODINGS = {"s": SYMMETRIC, "b": CODEBOOK}


def layouts_of(widths: str, kv_heads: int, head_dim: int, group_size: int = 128) -> Layouts:
    """Rows of given widths in bits, such as k3v2 or k16v2; in k2bv2s letters are codings: b codebook, s symmetric."""
    goal = BitGoal.parse("".join(letter for letter in widths if letter not in CODINGS))
    assert goal.key is not None
    assert goal.value is not None
    codings = (CODINGS.get(side[-1:], AFFINE) for side in widths.partition("v")[::2])
    key, value = (
        RowLayout(kv_heads, head_dim, min(group_size, head_dim), torch.bfloat16, bits, coding=coding)
        for bits, coding in zip((goal.key, goal.value), codings, strict=True)
    )
    return key, value


def book_of(layout: RowLayout, seed: int = 0) -> Codebook | None:
    """Random points where rows are indexes of points, the same for all kv heads and groups as a fit makes them."""
    if layout.coding != CODEBOOK:
        return None
    points = torch.randn((POINTS, GROUP), generator=torch.Generator().manual_seed(seed))
    return Codebook.from_shared(points, torch.ones(layout.kv_heads, layout.head_dim // GROUP)).to(device())


def layer_format(layouts: Layouts, key: SideTransform, value: SideTransform) -> LayerFormat:
    """Sides in rows of given layouts."""
    of_sides = zip(layouts, (key, value), strict=True)
    key_side, value_side = (
        SideFormat(
            layout.group_size, layout.scale_dtype, layout.bits, of, coding=layout.coding, codebook=book_of(layout)
        )
        for layout, of in of_sides
    )
    return LayerFormat(layouts[0].kv_heads, layouts[0].head_dim, key_side, value_side)


def rotation_of(head_dim: int) -> torch.Tensor:
    """A random rotation, float32 [head_dim, head_dim]."""
    return torch.linalg.qr(torch.randn(head_dim, head_dim, dtype=torch.float64))[0].float().to(device())


def random_cache(
    slots: int, requests: int, layouts: Layouts, windows: Windows, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> LayerCache:
    """Random codes, scales around 0.5 and zero points around 1.5; normal numbers in rows of 16 bits."""
    heads, where = (layouts[0].kv_heads, layouts[0].head_dim), device()
    generator = torch.Generator(device=where).manual_seed(seed)

    def rows(layout: RowLayout) -> torch.Tensor:
        data = torch.empty(slots, layout.row_bytes, dtype=torch.uint8, device=where)
        if layout.exact:
            data.view(layout.exact_dtype).normal_(generator=generator)
            return data
        data.random_(generator=generator)
        params = torch.rand(
            slots,
            layout.kv_heads * layout.groups,
            layout.group_params,
            device=where,
            generator=generator,
            dtype=torch.bfloat16,
        )
        params = params * 0.5 + torch.tensor([0.25, 1.25], device=where, dtype=torch.bfloat16)[: layout.group_params]
        data[:, layout.params_offset :] = params.to(layout.scale_dtype).flatten(1).view(torch.uint8)
        return data

    def window(size: int) -> torch.Tensor:
        return torch.randn((requests + 1, size, *heads), device=where, generator=generator).to(dtype)

    sinks, rings = ((window(size), window(size)) for size in (windows.sink, windows.ring))
    book = book_of(layouts[0], seed)
    return LayerCache(*layouts, windows, rows(layouts[0]), rows(layouts[1]), *sinks, *rings, book)


def shuffled_tables(lengths: list[int], page_size: int, seed: int = 0) -> tuple[BatchTables, int]:
    """Tables of requests on random pages, and the number of slots that the pages take (page 0 is a dummy)."""
    counts, where = [-(-length // page_size) for length in lengths], device()
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
    pages = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    used = 0
    for request, count in enumerate(counts):
        pages[request, :count] = order[used : used + count]
        used += count
    owner = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=where)
    start = torch.zeros_like(owner)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=where)
    tables = BatchTables(page_size, pages.to(where), kv_lens, owner, start, owner.clone())
    return tables, (sum(counts) + 1) * page_size


def stock_layers(
    heads: Heads, batch: int, length: int, dtype: torch.dtype
) -> tuple[BatchTables, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tables of requests; keys and values of every layer in a stock cache, [pages, page_size, kv heads, head_dim]."""
    tables, slots = shuffled_tables([length] * batch, PAGE)
    shape = (slots // PAGE, PAGE, heads.kv, heads.head_dim)
    layers = layers_of(2 * dtype.itemsize * math.prod(shape))
    return tables, [(random_pages(shape, dtype), random_pages(shape, dtype)) for _ in range(layers)]
