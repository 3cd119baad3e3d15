"""Rows that SGLang pads an extend or a verification with, so that ranks can share it, are neither attended to nor
stored."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.utils.common import ceil_align

from oscar_kernels.cache import BatchTables, LayerCache, StoreSlots
from oscar_kernels.transform import SideTransform
from oscar_kernels.visible import causal_words
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.attention.batch import Batch, largest_batch
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.memory.layer import CachedLayer

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from kernel_cases import Shape, empty_cache, random_rotation, random_vectors

CPU = torch.device("cpu")
SHAPE = Shape()
EXTEND, VERIFY = [5, 3], [4, 4]
"""New tokens by request; in verification all have as many."""
TOKENS = 8
PADDING = 3
BUFFERS = ("k_rows", "v_rows", "k_sink", "v_sink", "k_ring", "v_ring")


def backend_of(cache: LayerCache, lengths: list[int]) -> OscarAttentionBackend:
    """A backend whose batch is two fresh prompts, or two requests without history whose drafts are verified, on pages,
    rings and sink blocks 1 and 2."""
    made: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    made.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=None)
    rotation = random_rotation(SHAPE.head_dim, 1, CPU)
    made.kernels, made.q_heads = TorchKernels(), SHAPE.q_heads
    format = SHAPE.format(SideTransform(rotation, clip=0.96), SideTransform(rotation, clip=0.92))
    made.cache = SimpleNamespace(layers={7: CachedLayer(cache, format)})
    numbers = torch.tensor([1, 2], dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int32)
    tables = BatchTables(SHAPE.page_size, numbers[:, None], zeros, numbers, zeros, numbers)
    request, position = places(lengths)
    sink = (request + 1) * SHAPE.windows.sink + position
    ring = (request + 1) * SHAPE.windows.ring + position
    slots = StoreSlots(row=ring, ring=ring, sink=sink)
    made.batch = Batch(tables, slots, lengths, torch.tensor([0, lengths[0], TOKENS]), [0, 0])
    if lengths == VERIFY:
        made.batch = Batch(tables, slots, visible=causal_words(lengths[0], CPU).expand(len(lengths), -1))
    return made


def places(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of every token."""
    request = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    position = torch.tensor([p for length in lengths for p in range(length)])
    return request, position


def extend(lengths: list[int], padding: int) -> tuple[torch.Tensor, LayerCache]:
    """Output and cache of a pass with so many rows of garbage behind it."""
    cache = empty_cache(SHAPE, pages=4, requests=4, device=CPU)
    generator = random_vectors((TOKENS + padding, SHAPE.q_heads * SHAPE.head_dim), SHAPE.dtype, 5, CPU)
    width = SHAPE.kv_heads * SHAPE.head_dim
    q, k, v = generator.clone(), generator[:, :width].clone(), generator[:, -width:].clone()
    # The same real tokens whatever lies behind them.
    real = random_vectors((TOKENS, SHAPE.q_heads * SHAPE.head_dim), SHAPE.dtype, 6, CPU)
    q[:TOKENS], k[:TOKENS], v[:TOKENS] = real, real[:, :width], real[:, -width:]
    for x in (q, k, v):
        x[TOKENS:] = float("nan")
    request, position = places(lengths)
    slots = torch.cat([(request + 1) * SHAPE.page_size + position, torch.zeros(padding, dtype=torch.int64)])
    layer = SimpleNamespace(
        layer_id=7, tp_q_head_num=SHAPE.q_heads, tp_k_head_num=SHAPE.kv_heads, tp_v_head_num=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim, v_head_dim=SHAPE.head_dim, scaling=0.1,
    )  # fmt: skip
    out = backend_of(cache, lengths).forward_extend(q, k, v, layer, SimpleNamespace(out_cache_loc=slots))
    return out, cache


@pytest.mark.parametrize("padding", [1, PADDING])
@pytest.mark.parametrize("lengths", [EXTEND, VERIFY], ids=["extend", "verify"])
def test_padding_changes_nothing(lengths: list[int], padding: int) -> None:
    expected, plain = extend(lengths, 0)
    got, padded = extend(lengths, padding)
    assert got.shape == (TOKENS + padding, SHAPE.q_heads * SHAPE.head_dim)
    assert torch.equal(got[:TOKENS], expected)
    assert not got[TOKENS:].any()
    for name in BUFFERS:
        assert torch.equal(getattr(plain, name), getattr(padded, name)), name


@pytest.mark.parametrize(("requests", "ranks"), [(5, 1), (5, 2), (6, 2), (1, 8), (256, 8)])
def test_a_step_may_be_as_large_as_a_graph(requests: int, ranks: int) -> None:
    """SGLang fills the largest graph up to a multiple of the ranks."""
    seats = SimpleNamespace(ring_start=torch.zeros(requests + 1))
    assert largest_batch(SimpleNamespace(seats=seats), ranks) == ceil_align(requests, ranks)  # type: ignore[arg-type]
