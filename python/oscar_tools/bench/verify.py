"""Verification of drafts: several new tokens per request in one call, beside the same tokens as requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import torch

from oscar_kernels.cache import BatchTables, Windows
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.visible import causal_words
from oscar_tools.bench.decode import KERNELS, caches_of, make_workspace, queries, readings_of
from oscar_tools.bench.synthetic import WINDOWS, Heads, layouts_of
from oscar_tools.bench.timing import device, time_us


def repeated(tables: BatchTables, tokens: int) -> BatchTables:
    """Every request ``tokens`` times, as if its new tokens were requests."""
    names = ("page_table", "kv_lens", "ring_row", "ring_start", "sink_block")
    return BatchTables(tables.page_size, *(getattr(tables, name).repeat_interleave(tokens, 0) for name in names))


def verify_us(
    kernel: str, heads: Heads, batch: int, length: int, tokens: Sequence[int], widths: str = "k2v2"
) -> dict[str, float]:
    """Microseconds of one layer, whose outputs are multiplied: ``one`` token, ``verify_n`` for n tokens, ``apart_n``
    for n tokens as requests.

    Args:
        kernel: ``cuda`` or ``triton``, or ``cuda:passes`` for the kernel that decodes even where servers verify by
            ``verify.cu``.
        heads, batch, length: of the load.
        tokens: new tokens of a request, each number once.
        widths: of rows, in bits.
    """
    if kernel == "cuda:passes":
        with patch.object(cuda_decode, "_with_warpgroups", return_value=None):
            return verify_us("cuda", heads, batch, length, tokens, widths)
    module, layouts = KERNELS[kernel], layouts_of(widths, heads.kv, heads.head_dim)
    windows = Windows(WINDOWS.sink, WINDOWS.recent, WINDOWS.ring + max(tokens))
    tables, caches = caches_of(batch, length, layouts, windows)
    of_layers = list(zip(caches, readings_of(kernel, heads, len(caches)), strict=True))

    def one_by_one(new: int) -> float:
        q, several = queries(batch * new, heads), repeated(tables, new)
        out, space = torch.empty_like(q), make_workspace(kernel, caches[0], heads.query, batch * new)
        rest = several, q, heads.sm_scale, out, space
        return time_us([partial(module.decode, cache, *rest, reading=reading) for cache, reading in of_layers])

    def together(new: int) -> float:
        q, words = queries(batch * new, heads), causal_words(new, device()).repeat(batch, 1)
        rest = tables, words, q, heads.sm_scale, make_workspace(kernel, caches[0], heads.query, batch, new)
        return time_us([partial(module.verify, cache, *rest, reading=reading) for cache, reading in of_layers])

    times = {"one": one_by_one(1)}
    times |= {f"verify_{new}": together(new) for new in tokens}
    return times | {f"apart_{new}": one_by_one(new) for new in tokens}
