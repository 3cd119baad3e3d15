"""The CUDA kernel with several new tokens per request, against float64, with trees: on a Hopper GPU, or on a CPU thread
by thread.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    Shape,
    assert_as_good_as,
    break_new_token,
    filled_batch,
    multiplied,
    random_transform,
    random_trees,
    random_vectors,
    verify_exact,
    with_new_tokens,
    with_padding,
)

from oscar_kernels import reference
from oscar_kernels.cache import Windows
from oscar_kernels.cuda.decode import arrange_reading, decode, variant_of, verify
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.prepared import split_matrix
from oscar_kernels.visible import words_of
from support.hopper import DEVICE, MARKS, running

pytestmark = MARKS
WINDOWS = Windows(16, 24, 32)
BF16, FP16 = torch.bfloat16, torch.float16
QWEN3 = Shape(kv_heads=2, gqa=4, head_dim=128, group=128, windows=WINDOWS, page_size=32)
CASES = [
    (QWEN3, 4),
    (QWEN3, 8),
    (replace(QWEN3, k_bits=3, v_bits=4), 5),
    (Shape(kv_heads=3, gqa=2, head_dim=64, group=32, windows=Windows(0, 24, 40), page_size=32, dtype=FP16), 3),
    (Shape(kv_heads=1, gqa=1, head_dim=64, group=64, windows=Windows(16, 0, 40), page_size=32), 40),
    (Shape(kv_heads=1, gqa=12, head_dim=128, group=64, windows=Windows(0, 0, 8), page_size=32), 2),
    (Shape(kv_heads=1, gqa=2, head_dim=256, group=64, windows=WINDOWS, page_size=32), 7),
    (Shape(kv_heads=2, gqa=6, head_dim=256, group=128, windows=WINDOWS, page_size=32), 3),
]
LENGTHS = [40, 1, 15, 17, 39, 170, 330]


@pytest.mark.parametrize(("shape", "tokens"), CASES, ids=str)
def test_verify(shape: Shape, tokens: int) -> None:
    """Whatever must not be read is NaN: rows under windows, ring rows of nobody. Twice, bit for bit."""
    batch = with_new_tokens(filled_batch(shape, LENGTHS, DEVICE), tokens)
    seen = random_trees(len(LENGTHS), tokens)
    q = random_vectors((len(LENGTHS) * tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    sm_scale = 0.4 * shape.head_dim**-0.5
    with running():
        out = verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q, sm_scale)
        again = verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q, sm_scale)
    assert torch.equal(out, again)
    exact = verify_exact(batch, seen, q, sm_scale, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen, q, sm_scale, shape.dtype))


@pytest.mark.parametrize(("shape", "tokens", "per_head"), [(QWEN3, 6, True), (*CASES[3], False)], ids=str)
def test_outputs_are_multiplied(shape: Shape, tokens: int, per_head: bool) -> None:
    """By the matrix of their kv head; log-sum-exps; the last pass leaves alone what the one before has written."""
    lengths = [40, 1, 100]
    batch, seen = with_new_tokens(filled_batch(shape, lengths, DEVICE), tokens), random_trees(len(lengths), tokens)
    q = random_vectors((len(lengths) * tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads if per_head else None)[1].to(DEVICE)
    reading = arrange_reading(split_matrix(matrix, shape.dtype))
    sums, wanted = torch.empty(2, *q.shape[:2], device=DEVICE)
    with running():
        out = verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q, 0.04, reading=reading, lse=sums)
    reference.verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q.float(), None, 0.04, wanted)
    torch.testing.assert_close(sums, wanted, rtol=1e-2, atol=1e-2)
    exact, plain = (
        multiplied(verify_exact(batch, seen, q, 0.04, dtype), matrix) for dtype in (torch.float64, shape.dtype)
    )
    assert_as_good_as(out, exact, plain)


@pytest.mark.parametrize("shape", [QWEN3, replace(QWEN3, gqa=1, head_dim=256), replace(QWEN3, gqa=1)], ids=str)
def test_sums_make_room_between_runs(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two stages in place of hundreds: float and integer sums, beside the next keys and after their own."""
    defines = Variant.defines
    monkeypatch.setattr(Variant, "defines", lambda self: (*defines(self), ("OSCAR_RUN_STAGES", 2)))
    lengths, tokens = [700, 131, 40], 4
    batch, seen = with_new_tokens(filled_batch(shape, lengths, DEVICE), tokens), random_trees(len(lengths), tokens)
    q = random_vectors((len(lengths) * tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    with running():
        out = verify(batch.cache, batch.tables, words_of(seen).to(DEVICE), q, 0.04)
    exact = verify_exact(batch, seen, q, 0.04, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen, q, 0.04, shape.dtype))


def test_ring_starts_and_padding() -> None:
    """Rows before the ring's beginning are another request's; padded requests of a graph harm nobody."""
    batch = with_new_tokens(filled_batch(QWEN3, [40, 100, 60], DEVICE, ring_starts=[40, 90, 0]), 4)
    tables, seen = with_padding(batch.tables, 2), random_trees(5, 4)
    q = random_vectors((20, QWEN3.q_heads, QWEN3.head_dim), QWEN3.dtype, 99, DEVICE)
    with running():
        out = verify(batch.cache, tables, words_of(seen).to(DEVICE), q, 0.04)[:12]
    exact = verify_exact(batch, seen[:3], q[:12], 0.04, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen[:3], q[:12], 0.04, QWEN3.dtype))


@pytest.mark.parametrize("side", ["k_ring", "v_ring"])
@pytest.mark.parametrize(
    "shape",
    [QWEN3, replace(QWEN3, gqa=1), replace(QWEN3, gqa=1, head_dim=64, group=64, dtype=FP16)],
    ids=str,
)
def test_a_draft_that_is_no_number_is_told_to_those_that_see_it(shape: Shape, side: str) -> None:
    """Its ancestors, other branches and requests answer as if it were an ordinary draft that they do not see."""
    q = random_vectors((16, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    seen = random_trees(2, 8)
    words = words_of(seen).to(DEVICE)
    clean = with_new_tokens(filled_batch(shape, [50, 20], DEVICE), 8)
    broken = with_new_tokens(filled_batch(shape, [50, 20], DEVICE), 8)
    break_new_token(broken, 0, 5, side, float("nan"))
    with running():
        wanted = verify(clean.cache, clean.tables, words, q, 0.04)
        out = verify(broken.cache, broken.tables, words, q, 0.04)
    sees = torch.cat([seen[0, :, 5], torch.zeros(8, dtype=torch.bool)]).to(DEVICE)
    assert torch.equal(out[~sees], wanted[~sees])
    assert out[sees, -shape.gqa :].isnan().all()


def test_queries_side_by_side_with_others() -> None:
    """Heads of queries need not follow each other without gaps; outputs do."""
    batch, tokens = with_new_tokens(filled_batch(QWEN3, [70, 20], DEVICE), 4), 8
    wide = random_vectors((tokens, 2 * QWEN3.q_heads, QWEN3.head_dim), QWEN3.dtype, 99, DEVICE)
    q = wide[:, ::2]
    words = words_of(random_trees(2, 4)).to(DEVICE)
    with running():
        out = verify(batch.cache, batch.tables, words, q, 0.04)
        assert torch.equal(out, verify(batch.cache, batch.tables, words, q.contiguous(), 0.04))


def test_one_token_is_decode() -> None:
    """A new token that the length does not count reads what decode reads when the length counts it, if the window has
    room for both borders.
    """
    shape = replace(QWEN3, windows=Windows(0, 24, 25))
    batch = with_new_tokens(filled_batch(shape, [20], DEVICE), 1)
    q = random_vectors((1, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    longer = replace(batch.tables, kv_lens=batch.tables.kv_lens + 1)
    with running():
        one = verify(batch.cache, batch.tables, torch.ones(1, 1, dtype=torch.int64, device=DEVICE), q, 0.04)
        other = decode(batch.cache, longer, q, 0.04)
    torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("gqa", "tokens", "queries", "passes"), [(4, 4, 4, 1), (4, 6, 3, 2), (8, 4, 2, 2), (12, 3, 1, 3)]
)
def test_passes_have_one_size(gqa: int, tokens: int, queries: int, passes: int) -> None:
    shape = replace(QWEN3, gqa=gqa)
    cache = filled_batch(shape, [1], DEVICE).cache
    variant = variant_of(cache, 32, shape.q_heads, BF16, drafts=tokens)
    assert (variant.queries, variant.passes) == (queries, passes)


def test_what_does_not_fit_is_refused() -> None:
    batch = filled_batch(QWEN3, [40], DEVICE)
    q = random_vectors((9, QWEN3.q_heads, QWEN3.head_dim), BF16, 1, DEVICE)
    words = torch.ones(1, 9, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="need a ring of 33"):
        verify(batch.cache, batch.tables, words, q, 0.1)
    with pytest.raises(ValueError, match="an entry for each of 4 tokens"):
        verify(batch.cache, batch.tables, words[:, :5], q[:4], 0.1)
