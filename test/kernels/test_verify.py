"""Verification in plain torch and Triton against float64: trees, ring starts, every window; words of masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    OF_16_BITS,
    OF_EVERY_WIDTH,
    OF_OTHER_CODINGS,
    Batch,
    Shape,
    assert_as_good_as,
    break_new_token,
    filled_batch,
    multiplied,
    random_transform,
    random_trees,
    random_vectors,
    sampled,
    verify_exact,
    with_new_tokens,
    with_padding,
)

from oscar_kernels import reference
from oscar_kernels.cache import Windows
from oscar_kernels.prepared import split_matrix
from oscar_kernels.triton.decode import decode, queries_at_once, verify
from oscar_kernels.visible import causal_words, mask_of, words_of

CPU = torch.device("cpu")
SHAPE = Shape(page_size=16, windows=Windows(16, 24, 32))
SMALL = replace(SHAPE, kv_heads=1)
"""Triton's interpreter takes a second for every few heads of a token."""
WINDOWS = [Windows(16, 24, 32), Windows(0, 24, 40), Windows(16, 0, 8), Windows(0, 0, 8)]
LENGTHS = [40, 1, 15, 16, 39, 41, 170]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_verify(windows: Windows) -> None:
    """NaN is in every row of history under a window and in every ring row that no token has."""
    shape = replace(SHAPE, windows=windows)
    batch, seen = with_new_tokens(filled_batch(shape, LENGTHS, CPU), 8), random_trees(len(LENGTHS), 8)
    q = random_vectors((len(LENGTHS) * 8, shape.q_heads, shape.head_dim), torch.float32, 99, CPU)
    out = reference.verify(batch.cache, batch.tables, words_of(seen), q, None, 0.1)
    torch.testing.assert_close(out.double(), verify_exact(batch, seen, q, 0.1, torch.float64), rtol=1e-4, atol=1e-5)


def test_ring_starts() -> None:
    """Ring rows before a request's own are NaN here: history is read instead."""
    batch, seen = with_new_tokens(filled_batch(SHAPE, [40, 100], CPU, ring_starts=[40, 90]), 8), random_trees(2, 8)
    q = random_vectors((16, SHAPE.q_heads, SHAPE.head_dim), torch.float32, 99, CPU)
    out = reference.verify(batch.cache, batch.tables, words_of(seen), q, None, 0.1)
    torch.testing.assert_close(out.double(), verify_exact(batch, seen, q, 0.1, torch.float64), rtol=1e-4, atol=1e-5)


def check(
    shape: Shape, tokens: int, kv_lens: list[int], device: torch.device, ring_starts: list[int] | None = None
) -> None:
    """The Triton kernel, padded as in a CUDA graph, in a poisoned workspace."""
    batch = with_new_tokens(filled_batch(shape, kv_lens, device, ring_starts), tokens)
    seen = random_trees(len(kv_lens) + 2, tokens)
    q = random_vectors(((len(kv_lens) + 2) * tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    tables, sm_scale = with_padding(batch.tables, 2), 0.4 * shape.head_dim**-0.5
    real = len(kv_lens) * tokens
    out = verify(batch.cache, tables, words_of(seen).to(device), q, sm_scale)[:real]
    exact = verify_exact(batch, seen, q[:real], sm_scale, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen, q[:real], sm_scale, shape.dtype))


@pytest.mark.parametrize(("windows", "tokens"), list(zip(WINDOWS, (8, 5, 2, 3), strict=True)), ids=str)
def test_triton(windows: Windows, tokens: int, device: torch.device) -> None:
    check(replace(SMALL, windows=windows), tokens, LENGTHS[3:6], device)


@pytest.mark.parametrize("shape", sampled([*OF_EVERY_WIDTH, *OF_16_BITS[:2], *OF_OTHER_CODINGS]), ids=str)
def test_triton_with_rows_of_every_width(shape: Shape, device: torch.device) -> None:
    windows = Windows(shape.windows.sink, shape.windows.recent, shape.windows.recent + 4)
    check(replace(shape, kv_heads=min(shape.kv_heads, 2), windows=windows), 4, [50], device)


def test_triton_multiplies_outputs(device: torch.device) -> None:
    """Six tokens in two passes, each of which merges heads of several tokens for a matrix, and log-sum-exps."""
    shape = replace(SHAPE, windows=Windows(16, 24, 40))
    batch, seen = with_new_tokens(filled_batch(shape, [1, 50], device), 6), random_trees(2, 6)
    q = random_vectors((12, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads)[1].to(device)
    words, reading = words_of(seen).to(device), split_matrix(matrix, shape.dtype)
    sums, wanted = torch.empty(2, *q.shape[:2], device=device)
    out = verify(batch.cache, batch.tables, words, q, 0.05, reading=reading, lse=sums)
    reference.verify(batch.cache, batch.tables, words, q.float(), None, 0.05, wanted)
    torch.testing.assert_close(sums, wanted, rtol=1e-2, atol=1e-2)
    exact, plain = (
        multiplied(verify_exact(batch, seen, q, 0.05, dtype), matrix) for dtype in (torch.float64, shape.dtype)
    )
    assert_as_good_as(out, exact, plain)


def test_triton_ring_starts(device: torch.device) -> None:
    check(SMALL, 4, [70, 70], device, [70, 50])


def test_triton_one_token_is_decode(device: torch.device) -> None:
    """Where the recent window has room for either border."""
    shape = replace(SHAPE, windows=Windows(0, 24, 25))
    batch = with_new_tokens(filled_batch(shape, [20], device), 1)
    q = random_vectors((1, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    longer = replace(batch.tables, kv_lens=batch.tables.kv_lens + 1)
    one = verify(batch.cache, batch.tables, torch.ones(1, 1, dtype=torch.int64, device=device), q, 0.1)
    # Weights are rounded to 16 bits tile by tile, and the tiles are others.
    torch.testing.assert_close(one, decode(batch.cache, longer, q, 0.1), rtol=2**-7, atol=1e-3)


NAN, INFINITY = float("nan"), float("inf")


def spoil_a_draft(shape: Shape, side: str, number: float, device: torch.device) -> tuple[Batch, torch.Tensor]:
    """Requests of which the first has a draft that is no number, and who sees it: bool [tokens]."""
    batch = with_new_tokens(filled_batch(shape, [50, 20], device), 8)
    seen = random_trees(2, 8)
    break_new_token(batch, 0, 5, side, number)
    return batch, seen[0, :, 5]


Ask = Callable[[Batch], torch.Tensor]


@cache
def asked(kernel: str, device: torch.device) -> tuple[Shape, Ask, torch.Tensor]:
    """A shape, how eight drafts of two requests are verified, and what comes of drafts that are all numbers."""
    shape = SMALL if kernel == "triton" else SHAPE
    q = random_vectors((16, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    words = words_of(random_trees(2, 8)).to(device)
    run = verify if kernel == "triton" else partial(reference.verify, reading=None)

    def ask(batch: Batch) -> torch.Tensor:
        return run(batch.cache, batch.tables, words, q, sm_scale=0.1)

    return shape, ask, ask(with_new_tokens(filled_batch(shape, [50, 20], device), 8))


@pytest.mark.parametrize("number", [NAN, INFINITY], ids=str)
@pytest.mark.parametrize("side", ["k_ring", "v_ring"])
@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_a_draft_that_is_no_number_is_told_to_those_that_see_it(
    kernel: str, side: str, number: float, device: torch.device
) -> None:
    """Its ancestors, other branches and requests answer as if it were an ordinary draft that they do not see."""
    shape, ask, wanted = asked(kernel, device)
    batch, sees = spoil_a_draft(shape, side, number, device)
    out = ask(batch)
    sees = torch.cat([sees, torch.zeros(8, dtype=torch.bool)]).to(device)
    assert torch.equal(out[~sees], wanted[~sees])
    if (side, number) != ("k_ring", INFINITY):  # an infinite logit of either sign is a number to its softmax
        assert not out[sees, -SHAPE.gqa :].isfinite().all(-1).any()


@pytest.mark.parametrize("number", [NAN, INFINITY], ids=str)
def test_a_query_that_is_no_number_is_alone_with_it(number: float, device: torch.device) -> None:
    """Queries of a pass share the power of two that they are multiplied by."""
    batch = with_new_tokens(filled_batch(SHAPE, [170], device), 4)
    words = words_of(random_trees(1, 4)).to(device)
    q = random_vectors((4, SHAPE.q_heads, SHAPE.head_dim), SHAPE.dtype, 99, device)
    wanted = verify(batch.cache, batch.tables, words, q, 0.1)
    q[3, :, 5] = number
    out = verify(batch.cache, batch.tables, words, q, 0.1)
    torch.testing.assert_close(out[:3], wanted[:3], rtol=2**-7, atol=1e-5)


def test_passes_have_one_size() -> None:
    assert [queries_at_once(*of) for of in ((4, 4), (6, 4), (12, 4), (4, 8), (3, 12), (2, 32))] == [4, 3, 4, 2, 1, 1]


def test_a_ring_without_room_is_refused() -> None:
    batch = filled_batch(SHAPE, [40], CPU)
    q = random_vectors((9, SHAPE.q_heads, SHAPE.head_dim), torch.float32, 1, CPU)
    with pytest.raises(ValueError, match="need a ring of 33"):
        reference.verify(batch.cache, batch.tables, torch.ones(1, 9, dtype=torch.int64), q, None, 0.1)


@given(st.integers(1, 64), st.integers(0, 99))
def test_words_and_masks(tokens: int, seed: int) -> None:
    """Both ways, also where the last bit is the sign."""
    mask = torch.rand(2, tokens, tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    assert torch.equal(mask_of(words_of(mask)), mask)
    assert torch.equal(mask_of(causal_words(tokens, CPU)), torch.ones(tokens, tokens).tril().bool())


def test_more_tokens_than_bits() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        causal_words(65, CPU)
