"""Prefixes and chunks that are attended to at once: which batches, where their rows are, and the result in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Shape, filled_batch, sampled
from test_extend import make
from test_ragged_extend import JOINED, SHAPES, check

from oscar_kernels.cache import Windows
from oscar_kernels.extend_plan import Limits, cut_prefixes
from oscar_kernels.joined_extend import UNCUT, is_joined, lengths_joined, rows_of_chunks
from oscar_kernels.spans import Spans
from oscar_kernels.triton.prefix import copy_prefixes


@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_prefixes_and_chunks_at_once(shape: Shape, device: torch.device) -> None:
    """Where all fits: prefixes from within the sinks to several pages, requests without prefix or chunk between."""
    check(make(shape, [0, 1, 30, 150, 70], [5, 64, 3, 66, 0], device), device, JOINED)


@pytest.mark.gpu
def test_at_size(device: torch.device) -> None:
    shape = Shape(gqa=4, kv_heads=8, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
    limits = Limits(8400, 8, 32, 2240, joined=True)
    check(make(shape, [0, 7000, 1], [1000, 256, 64], device), device, limits)


def test_rows_behind_a_prefix_are_left(device: torch.device) -> None:
    """They are a chunk's."""
    shape = Shape()
    batch = filled_batch(shape, [150, 5], device)
    requests, indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [0, 250, 400]))
    space = torch.full((2, 400, shape.kv_heads, shape.head_dim), 7.0, dtype=shape.dtype, device=device)
    copy_prefixes(batch.cache, batch.tables, Spans(requests, torch.zeros_like(requests), indptr), *space)
    left = (space == 7).all(-1).all(-1).all(0).cpu()
    assert left.tolist() == [False] * 150 + [True] * 100 + [False] * 5 + [True] * 145


LENGTHS = st.lists(st.tuples(st.integers(0, 100), st.sampled_from([0, 2, 20, 33])), min_size=1, max_size=7)


@given(LENGTHS)
def test_rows_of_joined_batches(lengths: list[tuple[int, int]]) -> None:
    """Every token has a row of its own, each request's chunk behind its prefix; a request without a chunk has none."""
    prefixes, chunks = map(list, zip(*lengths, strict=True))
    cut = cut_prefixes(prefixes, chunks, JOINED)
    wanted = any(prefix and chunk for prefix, chunk in lengths)
    assert is_joined(prefixes, chunks, cut, JOINED, q_heads=8, processors=132) == wanted
    indptr = torch.tensor([0, *lengths_joined(prefixes, chunks)]).cumsum(0)
    assert indptr[-1] <= JOINED.capacity
    rows = rows_of_chunks(prefixes, chunks, indptr).tolist()
    firsts = [first + prefix for first, prefix in zip(indptr.tolist(), prefixes, strict=False)]
    assert rows == [first + token for first, chunk in zip(firsts, chunks, strict=True) for token in range(chunk)]


def test_what_is_not_joined() -> None:
    """Batches that do not fit, that the decode kernel has a part in, and long prefixes whose pieces fill the GPU."""

    def joined(prefixes: list[int], chunks: list[int], break_even: int = 0) -> bool:
        limits = Limits(65536, 8, break_even, 0, joined=True)
        return is_joined(prefixes, chunks, cut_prefixes(prefixes, chunks, limits), limits, q_heads=32, processors=132)

    assert joined([2048, 0], [128, 300])
    assert joined([63000], [2536])
    assert not joined([63000], [2537])
    assert not joined([0, 0], [128, 300])
    assert not joined([2048, 2048], [128, 1])
    assert not joined([2048, 2048], [128, 5], break_even=32)
    assert joined([UNCUT - 128], [128])
    assert not joined([UNCUT], [128])
    assert joined([UNCUT], [512])
