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
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.cuda.decode import (
    _workspace_numel,
    arrange_reading,
    decode,
    make_workspace,
    variant_of,
    verify,
    workspace_numel,
)
from oscar_kernels.cuda.variant import Variant
from oscar_kernels.layout import SYMMETRIC
from oscar_kernels.prepared import split_matrix
from oscar_kernels.visible import causal_words, words_of
from support.hopper import DEVICE, HOPPER, MARKS, running

pytestmark = MARKS
WINDOWS = Windows(16, 24, 32)
BF16, FP16 = torch.bfloat16, torch.float16
QWEN3 = Shape(kv_heads=2, gqa=4, head_dim=128, group=128, windows=WINDOWS, page_size=32)
WIDE = Shape(kv_heads=2, gqa=8, head_dim=256, group=128, windows=WINDOWS, page_size=64, k_bits=3)
"""Four tokens are 32 columns, for products of four warps; see :attr:`Variant.warpgroups`."""
CASES = [
    (QWEN3, 4),
    (QWEN3, 8),
    (replace(QWEN3, k_bits=3, v_bits=4), 5),
    (Shape(kv_heads=3, gqa=2, head_dim=64, group=32, windows=Windows(0, 24, 40), page_size=32, dtype=FP16), 3),
    (Shape(kv_heads=1, gqa=1, head_dim=64, group=64, windows=Windows(16, 0, 40), page_size=32), 40),
    (Shape(kv_heads=1, gqa=12, head_dim=128, group=64, windows=Windows(0, 0, 8), page_size=32), 2),
    (Shape(kv_heads=1, gqa=2, head_dim=256, group=64, windows=WINDOWS, page_size=32), 7),
    (Shape(kv_heads=2, gqa=6, head_dim=256, group=128, windows=WINDOWS, page_size=32, k_bits=4), 3),
    (WIDE, 4),
    (replace(WIDE, k_bits=2, page_size=32, windows=Windows(0, 0, 8)), 5),  # two passes of 24 columns that overlap
    (replace(WIDE, gqa=1, page_size=128, windows=Windows(70, 24, 64), dtype=FP16, scale_dtype=FP16), 20),
    (replace(WIDE, gqa=16, k_bits=2, windows=Windows(16, 0, 8), scale_dtype=FP16), 2),
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


@pytest.mark.parametrize(
    ("shape", "tokens", "per_head"), [(QWEN3, 6, True), (*CASES[3], False), (WIDE, 5, True)], ids=str
)
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


@pytest.mark.parametrize("shape", [QWEN3, replace(QWEN3, gqa=1, head_dim=256), replace(QWEN3, gqa=1), WIDE], ids=str)
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


@pytest.mark.parametrize("shape", [QWEN3, WIDE], ids=str)
def test_ring_starts_and_padding(shape: Shape) -> None:
    """Rows before the ring's beginning are another request's; padded requests of a graph harm nobody."""
    batch = with_new_tokens(filled_batch(shape, [40, 100, 60], DEVICE, ring_starts=[40, 90, 0]), 4)
    tables, seen = with_padding(batch.tables, 2), random_trees(5, 4)
    q = random_vectors((20, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    with running():
        out = verify(batch.cache, tables, words_of(seen).to(DEVICE), q, 0.04)[:12]
    exact = verify_exact(batch, seen[:3], q[:12], 0.04, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen[:3], q[:12], 0.04, shape.dtype))


@pytest.mark.parametrize("side", ["k_ring", "v_ring"])
@pytest.mark.parametrize(
    "shape",
    [QWEN3, replace(QWEN3, gqa=1), replace(QWEN3, gqa=1, head_dim=64, group=64, dtype=FP16), WIDE],
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


@pytest.mark.parametrize("shape", [QWEN3, WIDE], ids=str)
def test_queries_side_by_side_with_others(shape: Shape) -> None:
    """Heads of queries need not follow each other without gaps; outputs do."""
    batch, tokens = with_new_tokens(filled_batch(shape, [70, 20], DEVICE), 4), 8
    wide = random_vectors((tokens, 2 * shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
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


@pytest.mark.parametrize(
    ("shape", "tokens", "columns", "passes"),
    [
        (WIDE, 4, 32, 1),
        (WIDE, 5, 24, 2),
        (replace(WIDE, gqa=6, k_bits=2), 3, 18, 1),
        (WIDE, 2, 0, 1),  # as many as decode.cu takes
        (replace(WIDE, kv_heads=4), 4, 0, 2),
        (replace(WIDE, k_bits=4), 4, 0, 2),
        (replace(WIDE, v_bits=3), 4, 0, 2),
        (replace(WIDE, group=64), 4, 0, 2),
        (replace(WIDE, v_group=256), 4, 0, 2),
        (replace(WIDE, head_dim=128), 4, 0, 2),
        (replace(WIDE, scale_dtype=torch.float32), 4, 0, 2),
        (replace(WIDE, v_coding=SYMMETRIC), 4, 0, 2),
        (replace(WIDE, gqa=12), 3, 24, 2),
    ],
    ids=str,
)
def test_products_of_four_warps_where_they_fit(shape: Shape, tokens: int, columns: int, passes: int) -> None:
    """``columns``: of them, 0 where others are taken. A workspace has room for either."""
    cache = filled_batch(shape, [1], DEVICE).cache
    for dtype in (BF16, FP16):
        found = variant_of(cache, shape.page_size, shape.q_heads, dtype, drafts=tokens)
        wide = columns > 0 and dtype == shape.dtype
        assert (found.warpgroups, found.source) == (wide, "verify.cu" if wide else "decode.cu")
        assert not wide or (found.columns, found.passes) == (columns, passes)
        assert columns or found.passes == passes
        with running():
            assert workspace_numel(cache, shape.q_heads, 3, tokens) >= _workspace_numel(found, DEVICE, 3)


def test_a_query_that_is_no_number_harms_no_other() -> None:
    """Columns have one unit, which is of the others."""
    batch, words = with_new_tokens(filled_batch(WIDE, [170], DEVICE), 4), causal_words(4, DEVICE)[None]
    q = random_vectors((4, WIDE.q_heads, WIDE.head_dim), WIDE.dtype, 99, DEVICE)
    broken = q.clone()
    broken[1, 3, 7], broken[2, 9, 100] = float("inf"), float("nan")
    with running():
        wanted, out = (verify(batch.cache, batch.tables, words, x, 0.04) for x in (q, broken))
    spoiled = torch.zeros(4, WIDE.q_heads, dtype=torch.bool, device=DEVICE)
    spoiled[1, 3] = spoiled[2, 9] = True
    assert out[spoiled].isnan().all()
    torch.testing.assert_close(out[~spoiled], wanted[~spoiled], rtol=2**-7, atol=1e-3)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.gpu
@pytest.mark.parametrize("k_bits", [2, 3])
@pytest.mark.parametrize("blocks", [None, 2], ids=["a block each", "two blocks"])
@pytest.mark.parametrize("lengths", [[131_072], [1, 64, 320, 321, 9000, 2, 40_000, 8191] * 2, [700] * 150], ids=str)
def test_at_size(lengths: list[int], blocks: int | None, k_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with more stages than tensor cores may sum up, with many requests, and most of the card's with one."""
    if blocks is not None:
        monkeypatch.setattr(cuda, "processors", lambda device: blocks)
    shape = replace(WIDE, k_bits=k_bits, windows=Windows(64, 256, 264))
    batch, seen = with_new_tokens(filled_batch(shape, lengths, DEVICE), 4), random_trees(len(lengths), 4)
    q = random_vectors((len(lengths) * 4, shape.q_heads, shape.head_dim), shape.dtype, 99, DEVICE)
    words = words_of(seen).to(DEVICE)
    out = verify(batch.cache, batch.tables, words, q, 0.01)
    assert torch.equal(out, verify(batch.cache, batch.tables, words, q, 0.01))
    exact = verify_exact(batch, seen, q, 0.01, torch.float64)
    assert_as_good_as(out, exact, verify_exact(batch, seen, q, 0.01, shape.dtype))


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.gpu
def test_graph_replay_follows_the_tables() -> None:
    """Launches overlap in a captured graph, which serves every length."""
    batch, words = (
        with_new_tokens(filled_batch(WIDE, [5000, 3, 700, 60], DEVICE), 4),
        words_of(random_trees(4, 4)).to(DEVICE),
    )
    q = random_vectors((16, WIDE.q_heads, WIDE.head_dim), WIDE.dtype, 99, DEVICE)
    workspace = make_workspace(batch.cache, WIDE.q_heads, 4, 4)
    wanted = verify(batch.cache, batch.tables, words, q, 0.04, workspace)
    lengths = batch.tables.kv_lens.clone()
    batch.tables.kv_lens.fill_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [verify(batch.cache, batch.tables, words, q, 0.04, workspace) for _ in range(4)]
    batch.tables.kv_lens.copy_(lengths)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


def test_what_does_not_fit_is_refused() -> None:
    batch = filled_batch(QWEN3, [40], DEVICE)
    q = random_vectors((9, QWEN3.q_heads, QWEN3.head_dim), BF16, 1, DEVICE)
    words = torch.ones(1, 9, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="need a ring of 33"):
        verify(batch.cache, batch.tables, words, q, 0.1)
    with pytest.raises(ValueError, match="an entry for each of 4 tokens"):
        verify(batch.cache, batch.tables, words[:, :5], q[:4], 0.1)
