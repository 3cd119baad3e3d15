"""The decode kernel against float64 attention over the same codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    OF_16_BITS,
    OF_EVERY_WIDTH,
    OF_OTHER_CODINGS,
    Shape,
    assert_as_good_as,
    assert_lse,
    decode_exact,
    filled_batch,
    multiplied,
    poison,
    random_transform,
    random_vectors,
    sampled,
    with_padding,
)

from oscar_kernels.cache import Windows
from oscar_kernels.codec import encode_rows
from oscar_kernels.prepared import split_matrix
from oscar_kernels.triton import decode as decode_module
from oscar_kernels.triton.decode import decode, window_parts, workspace_numel

SHAPES = [
    Shape(),
    Shape(gqa=1, kv_heads=1, head_dim=128, group=128),
    Shape(gqa=2, kv_heads=4, head_dim=64, group=32, scale_dtype=torch.float16),
    Shape(gqa=5, kv_heads=3, head_dim=128, group=32, dtype=torch.float16),
    Shape(gqa=8, kv_heads=1, head_dim=128, group=64, scale_dtype=torch.float32),
    Shape(gqa=16, kv_heads=1, head_dim=256, group=32),
    Shape(gqa=4, kv_heads=9, head_dim=64, group=64, page_size=64),
    Shape(windows=Windows(0, 0, 0)),
    Shape(windows=Windows(16, 0, 8)),
    Shape(windows=Windows(0, 24, 24), page_size=128),
    Shape(windows=Windows(64, 256, 256), page_size=32),
    Shape(windows=Windows(64, 256, 256, max_splits=2), page_size=64),
    *OF_EVERY_WIDTH,
    *OF_16_BITS,
    *OF_OTHER_CODINGS,
]


def check(shape: Shape, kv_lens: list[int], device: torch.device, ring_starts: list[int] | None = None, **options):
    batch = filled_batch(shape, kv_lens, device, ring_starts)
    q = random_vectors((len(kv_lens), shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    sm_scale = 0.4 * shape.head_dim**-0.5
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    out = decode(batch.cache, batch.tables, q, sm_scale, lse=lse, **options)
    assert out.dtype == q.dtype
    assert_lse(lse, batch, q, sm_scale)
    exact = decode_exact(batch, q, sm_scale, torch.float64)
    assert_as_good_as(out, exact, decode_exact(batch, q, sm_scale, shape.dtype))
    return batch, q, sm_scale, out


@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_ragged_lengths(shape: Shape, device: torch.device) -> None:
    """Fewer than the windows to several pieces, one request empty."""
    check(shape, [39, 0, 17, 210], device)


@pytest.mark.parametrize(
    ("shape", "per_head", "lens"),
    [(SHAPES[0], True, [210]), (SHAPES[0], False, [1, 0, 39, 17] * 3), (SHAPES[3], True, [40, 70]),
     (OF_EVERY_WIDTH[3], True, [40])],
    ids=str,
)  # fmt: skip
def test_outputs_are_multiplied(shape: Shape, per_head: bool, lens: list[int], device: torch.device) -> None:
    """By the matrix of their kv head: one program merges a head, or those of several requests."""
    batch = filled_batch(shape, lens, device)
    q = random_vectors((len(lens), shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads if per_head else None)[1].to(device)
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    out = decode(batch.cache, batch.tables, q, 0.05, lse=lse, reading=split_matrix(matrix, shape.dtype))
    assert_lse(lse, batch, q, 0.05)
    exact, plain = (multiplied(decode_exact(batch, q, 0.05, of), matrix) for of in (torch.float64, shape.dtype))
    assert_as_good_as(out, exact, plain)


@pytest.mark.parametrize(
    ("windows", "parts"),
    [
        (Windows(64, 256, 256), (1, 2, 128)),
        (Windows(64, 256, 256, max_splits=2), (1, 1, 256)),
        (Windows(64, 4096, 4096), (1, 4, 1024)),
        (Windows(0, 256, 256, max_splits=1), (0, 1, 256)),
        (Windows(0, 0, 0, max_splits=1), (0, 0, 128)),
    ],
)
def test_window_splits_are_bounded(windows: Windows, parts: tuple[int, int, int]) -> None:
    assert window_parts(windows) == parts


@pytest.mark.parametrize("ring_starts", [[200, 150, 1], [100, 199, 180]])
def test_ring_holds_only_what_this_request_wrote(ring_starts: list[int], device: torch.device) -> None:
    check(Shape(), [200, 200, 200], device, ring_starts)


@pytest.mark.parametrize("splits", [1, 3, 20])
def test_every_split_gives_the_same(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "MIN_TILES", 1)
    monkeypatch.setattr(decode_module, "default_pieces", lambda cache: splits)
    check(Shape(), [500, 5, 130], device)


def test_values_of_any_magnitude(device: torch.device) -> None:
    """Value scales far outside float16, logits beyond exp's range."""
    shape = Shape(scale_dtype=torch.float32, windows=Windows(0, 0, 0))
    for factor in (1e-9, 1e7):
        batch = filled_batch(shape, [200, 70], device)
        params = batch.cache.v_rows[:, shape.value_layout.params_offset :].contiguous().view(torch.float32)
        params = params.view(-1, shape.kv_heads, shape.value_layout.groups, 2)
        params[..., 0] *= factor
        batch.cache.v_rows[:, shape.value_layout.params_offset :] = params.flatten(1).view(torch.uint8)
        q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, device) * 20
        out = decode(batch.cache, batch.tables, q, 1.0, out=torch.empty(q.shape, device=device))
        exact = decode_exact(batch, q, 1.0, torch.float64)
        assert_as_good_as(out, exact, decode_exact(batch, q, 1.0, shape.dtype))


@pytest.mark.parametrize("group", [32, 64])
def test_equal_values_count(group: int, device: torch.device) -> None:
    """Tokens whose values are constant have tiny scales: they weigh what their logits say nevertheless."""
    shape = Shape(kv_heads=1, gqa=2, group=group, windows=Windows(0, 0, 0))
    batch = filled_batch(shape, [8], device)
    values = random_vectors((8, 1, 64), torch.float32, 5, device)
    values[::2] = 1.0
    slot = int(batch.tables.page_table[0, 0]) * shape.page_size
    batch.cache.v_rows[slot : slot + 8] = encode_rows(values, shape.value_layout, 1.0)
    q = torch.zeros(1, 2, 64, dtype=shape.dtype, device=device)
    out = decode(batch.cache, batch.tables, q, 0.1)
    exact = decode_exact(batch, q, 0.1, torch.float64)
    assert_as_good_as(out, exact, decode_exact(batch, q, 0.1, shape.dtype))


@pytest.mark.parametrize("side", ["k_rows", "v_rows"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], OF_OTHER_CODINGS[0]], ids=str)
def test_a_nan_reaches_the_heads_that_read_it(shape: Shape, side: str, device: torch.device) -> None:
    batch = filled_batch(shape, [75, 40], device)
    q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    clean = decode(batch.cache, batch.tables, q, 0.05)
    poison(batch, side, request=0, position=30)
    out = decode(batch.cache, batch.tables, q, 0.05)
    assert out[0, -shape.gqa :].isnan().all()
    out[0, -shape.gqa :] = clean[0, -shape.gqa :]
    assert torch.equal(out, clean)


def test_padded_rows_are_harmless(device: torch.device) -> None:
    """Graph padding reads the NaN-filled dummies; the live rows do not change by a bit."""
    shape = Shape()
    batch = filled_batch(shape, [300, 45], device)
    q = random_vectors((4, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    padded = with_padding(batch.tables, 2)
    out = decode(batch.cache, padded, q, 0.1)
    assert torch.equal(out[:2], decode(batch.cache, batch.tables, q[:2], 0.1))
    assert out[2:].isnan().all()


def test_output_does_not_depend_on_the_log_sum_exp(device: torch.device) -> None:
    batch, q, sm_scale, out = check(Shape(), [0, 40, 210], device)
    assert torch.equal(out, decode(batch.cache, batch.tables, q, sm_scale))


def test_log_sum_exp_needs_its_shape(device: torch.device) -> None:
    batch = filled_batch(Shape(), [3], device)
    q = random_vectors((1, 8, 64), torch.bfloat16, 99, device)
    wrong = torch.empty(1, 7), torch.empty(1, 8, dtype=torch.float64)
    for lse in (*wrong, torch.empty(16, device=device)[::2].view(1, 8)):
        with pytest.raises(ValueError, match=r"lse must be contiguous float32 \[1, 8\]"):
            decode(batch.cache, batch.tables, q, 1.0, lse=lse)


def test_buffers_of_the_caller(device: torch.device) -> None:
    """Strided queries and output, a workspace full of NaN, and a workspace that is too small."""
    shape = Shape()
    batch = filled_batch(shape, [300, 45], device)
    wide = random_vectors((2, 2 * shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    out = torch.full_like(wide, 7.0)
    workspace = torch.full((workspace_numel(batch.cache, shape.q_heads, 4),), float("nan"), device=device)
    got = decode(batch.cache, batch.tables, wide[:, ::2], 0.1, out=out[:, ::2], workspace=workspace)
    assert torch.equal(got, decode(batch.cache, batch.tables, wide[:, ::2].contiguous(), 0.1))
    assert (out[:, 1::2] == 7.0).all()
    with pytest.raises(ValueError, match="workspace must hold"):
        decode(batch.cache, batch.tables, wide[:, ::2], 0.1, workspace=workspace[:10])


@pytest.mark.gpu
@pytest.mark.parametrize("gqa", [1, 4, 5, 16])
@pytest.mark.parametrize("kv_lens", [[100_000], [1, 64, 320, 321, 9000, 2, 40_000, 8191] * 4, [2048] * 256])
def test_decode_at_size(gqa: int, kv_lens: list[int], device: torch.device) -> None:
    shape = Shape(gqa=gqa, kv_heads=8, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
    check(shape, kv_lens, device)


@pytest.mark.gpu
def test_graph_replay_follows_the_tables(device: torch.device) -> None:
    """One captured graph serves every length, and capturing fails if anything synchronizes."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
    batch, q, sm_scale, want = check(shape, [5000, 3, 700], device)
    tables = replace(batch.tables, kv_lens=torch.ones_like(batch.tables.kv_lens))
    decode(batch.cache, tables, q, sm_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(batch.cache, tables, q, sm_scale)
    tables.kv_lens.copy_(batch.tables.kv_lens)
    graph.replay()
    assert torch.equal(out, want)
