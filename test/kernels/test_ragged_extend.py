"""Extend through a 16-bit attention kernel: cutting, dequantizing, merging, and all of it against float64.

Without a GPU the attention kernel is a plain torch one with FlashInfer's interface; on a GPU it is FlashInfer's.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    OF_16_BITS,
    OF_EVERY_WIDTH,
    OF_OTHER_CODINGS,
    Shape,
    assert_as_good_as,
    assert_copies_equal_the_cache,
    filled_batch,
    poison,
    sampled,
)
from test_extend import Case, exact, make

from oscar_kernels import extend_plan, ragged_plan
from oscar_kernels.cache import Windows
from oscar_kernels.extend_plan import MOST_SHORT, Decode, Limits, count_splits, cut_prefixes
from oscar_kernels.prepared import split_matrix
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.spans import Spans
from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.finite import make_values_finite_
from oscar_kernels.triton.merge_states import merge_states_
from oscar_kernels.triton.prefix import copy_prefixes
from oscar_kernels.triton.rotate import rotate
from sglang_oscar.attention import decode_choice

LOG2_E = 1.4426950408889634
LIMITS = Limits(capacity=100, passes=8, break_even=32, window=0)
JOINED = Limits(capacity=1000, passes=8, break_even=0, window=0, joined=True)


class TorchRagged:
    """Plain attention behind the interface of FlashInfer's ragged wrapper."""

    def plan(self, qo_indptr, kv_indptr, q_heads, kv_heads, head_dim, *, head_dim_vo, causal, q_data_type) -> None:
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu"
        self.q_spans, self.kv_spans = qo_indptr.tolist(), kv_indptr.tolist()
        self.shape, self.causal, self.dtype = (q_heads, kv_heads, head_dim, head_dim_vo), causal, q_data_type

    def forward(self, q, k, v, causal, sm_scale) -> torch.Tensor:
        return self.forward_return_lse(q, k, v, causal, sm_scale)[0]

    def forward_return_lse(self, q, k, v, causal, sm_scale) -> tuple[torch.Tensor, torch.Tensor]:
        assert causal == self.causal
        assert q.dtype == k.dtype == v.dtype == self.dtype
        assert (q.shape[1], *k.shape[1:], v.shape[2]) == self.shape
        assert q.shape[2] == k.shape[2]
        assert (len(q), len(k)) == (self.q_spans[-1], self.kv_spans[-1])
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        for i in range(len(self.q_spans) - 1):
            own = slice(*self.q_spans[i : i + 2])
            keys, values = (x[slice(*self.kv_spans[i : i + 2])].float() for x in (k, v))
            if own.start == own.stop or len(keys) == 0:
                continue
            heads = q.shape[1] // k.shape[1]
            logits = torch.einsum("qhd,thd->hqt", q[own].float(), keys.repeat_interleave(heads, 1)) * sm_scale
            if causal:
                count = own.stop - own.start
                later = torch.ones(count, len(keys), dtype=torch.bool, device=q.device).triu(len(keys) - count + 1)
                logits = logits.masked_fill(later, float("-inf"))
            values = values.repeat_interleave(heads, 1)
            out[own] = torch.einsum("hqt,thd->qhd", logits.softmax(-1), values).to(q.dtype)
            lse[own] = logits.logsumexp(-1).T * LOG2_E
        return out, lse


def attention_kernel(device: torch.device) -> Any:
    if device.type == "cpu":
        return TorchRagged
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    return lambda: BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD")


def ragged_extend_of(
    case: Case, limits: Limits, device: torch.device, kernel: Decode = decode, attention: Any = None
) -> RaggedExtend:
    shape, attention = case.batch.shape, attention or attention_kernel(device)
    planner = RaggedPlanner(shape.format(), shape.q_heads, shape.dtype, limits, device, attention, 132)
    return RaggedExtend(planner, kernel)


def run(
    case: Case, limits: Limits, device: torch.device, sm_scale: float, kernel: Decode, attention: Any
) -> torch.Tensor:
    tables = case.batch.tables
    ragged = ragged_extend_of(case, limits, device, kernel, attention)
    ragged.warm_up()
    plan = ragged.planner.plan(tables, tables.kv_lens.tolist(), case.lengths)
    assert plan.tokens == len(case.q)
    assert (plan.joined is not None) == limits.joined
    if plan.joined is not None:
        copies = ragged.load_joined(plan.joined, [case.batch.cache], tables)
        copies.k[copies.rows] = rotate(case.k, split_matrix(case.rotation, case.k.dtype))
        copies.v[copies.rows] = case.v
        return ragged.run_joined(copies, case.q_rot, sm_scale)
    q_rot = case.q_rot if plan.has_prefix else None
    return ragged.run(plan, [case.batch.cache], tables, case.chunks, q_rot, sm_scale)


def check(
    case: Case, device: torch.device, limits: Limits = LIMITS, kernel: Decode = decode, attention: Any = None
) -> None:
    sm_scale = 0.4 * case.q.shape[-1] ** -0.5
    out = run(case, limits, device, sm_scale, kernel, attention)
    assert out.dtype == case.q.dtype
    assert_as_good_as(out, exact(case, sm_scale, torch.float64), exact(case, sm_scale, case.q.dtype))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], Limits]:
    count = draw(st.integers(1, 8))
    prefixes = draw(st.lists(st.integers(0, 3000), min_size=count, max_size=count))
    chunks = draw(st.lists(st.sampled_from([0, 1, 2, 20, 32, 33, 500]), min_size=count, max_size=count))
    window = draw(st.sampled_from([0, 2240]))
    return prefixes, chunks, Limits(draw(st.integers(1, 2000)), draw(st.integers(1, 8)), 32, window)


@given(batches())
def test_every_cached_position_is_attended_to_once(batch: tuple[list[int], list[int], Limits]) -> None:
    """In one of four ways; passes are bounded in size and number, their requests in order."""
    prefixes, chunks, limits = batch
    cut = cut_prefixes(prefixes, chunks, limits)
    passes = cut.passes
    assert len(passes) <= limits.passes
    seen: dict[int, int] = dict.fromkeys(range(len(prefixes)), 0)
    spans = [span for one in passes for span in one]
    assert [(s.request, s.begin) for s in spans] == sorted((s.request, s.begin) for s in spans)
    for span in spans:
        assert span.begin == seen[span.request] < span.end
        seen[span.request] = span.end
    for one in passes:
        assert 0 < sum(span.end - span.begin for span in one) <= limits.capacity
    for request, (prefix, chunk) in enumerate(zip(prefixes, chunks, strict=True)):
        ways = [request in requests for requests in (cut.single, cut.short, cut.in_place)] + [seen[request] > 0]
        assert sum(ways) == (prefix > 0 and chunk > 0)
        assert seen[request] in (0, prefix)
        assert (request in cut.single) == (prefix > 0 and chunk == 1)
        assert request not in cut.short or 1 < chunk <= limits.break_even
        assert limits.window or prefix == 0 or (request in cut.short) == (1 < chunk <= limits.break_even)


SHAPES = [
    Shape(),
    Shape(gqa=1, kv_heads=3, head_dim=128, group=128, page_size=64),
    Shape(kv_heads=2, head_dim=128, group=32, dtype=torch.float16, scale_dtype=torch.float16),
    Shape(gqa=1, kv_heads=1, head_dim=256, group=32, scale_dtype=torch.float32),
    Shape(windows=Windows(0, 0, 0)),
    Shape(windows=Windows(0, 24, 24)),
    Shape(windows=Windows(16, 0, 8), page_size=32),
    *OF_EVERY_WIDTH,
]


@pytest.mark.parametrize("shape", sampled([*SHAPES, *OF_16_BITS, *OF_OTHER_CODINGS]), ids=str)
def test_prefix_copies_equal_the_cache(shape: Shape, device: torch.device) -> None:
    """Spans that begin and end anywhere, in any order; rows around them stay as they were."""
    batch = filled_batch(shape, [150, 5, 90], device, ring_starts=[140, 0, 0])
    assert_copies_equal_the_cache(batch, [(2, 13, 90), (0, 0, 150), (1, 0, 5), (0, 70, 71)], copy_prefixes)


@pytest.mark.parametrize("shape", [Shape(), OF_16_BITS[0]], ids=str)
def test_copied_values_are_numbers(shape: Shape, device: torch.device) -> None:
    """A tile of the attention kernel may reach from one request's rows into the next one's."""
    case = make(shape, [100], [1], device)
    case.batch.cache.v_ring[int(case.batch.tables.ring_row[0])] = float("nan")
    if not shape.value_layout.exact:
        poison(case.batch, "v_rows", request=0, position=60)
    k_out, v_out = (torch.empty(100, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device) for _ in "kv")
    one = Spans(*(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0], [0], [0, 100])))
    copy_prefixes(case.batch.cache, case.batch.tables, one, k_out, v_out)
    assert v_out.isfinite().all()


@pytest.mark.parametrize(
    ("number", "limits"), [(float("nan"), LIMITS), (float("-inf"), JOINED)], ids=["nan apart", "-inf joined"]
)
def test_a_value_that_is_no_number_is_told_to_later_tokens_only(
    number: float, limits: Limits, device: torch.device
) -> None:
    case = make(Shape(), [100, 70], [4, 2], device)
    clean = run(case, limits, device, 0.1, decode, None)
    case.v[2, -1, 3] = number
    make_values_finite_(case.k, case.v)
    out = run(case, limits, device, 0.1, decode, None)
    heads = slice(-case.batch.shape.gqa, None)
    assert out[2:4, heads].isnan().all()
    out[2:4, heads] = clean[2:4, heads]
    assert torch.equal(out, clean)


def test_numbers_are_left_as_they_are(device: torch.device) -> None:
    """Also where keys and values are slices of one projection."""
    fused = torch.randn(50, 6, 64, device=device).half()
    want = fused.clone()
    make_values_finite_(fused[:, 2:4], fused[:, 4:])
    assert torch.equal(fused, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merge_of_states(dtype: torch.dtype, device: torch.device) -> None:
    """Weights follow the log-sum-exp; a side over no keys counts for nothing, whatever the one that is merged holds.
    What is no number in the other stays so, also where its kernel says that there were no keys.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(37, 3, 64, generator=generator).to(dtype) for _ in range(2))
    lse_a, lse_b = (4 * torch.randn(37, 3, generator=generator) for _ in range(2))
    lse_a[3], lse_b[5], lse_a[7], lse_b[7], lse_a[9] = (float("-inf"),) * 5
    b[5], b[7] = (float("nan"),) * 2
    a[3], a[7] = 0, 0
    weights = torch.stack([lse_a, lse_b]).double().mul(torch.log(torch.tensor(2.0).double())).softmax(0).nan_to_num()
    wanted = sum(w[..., None] * x.double().nan_to_num() for w, x in zip(weights, (a, b), strict=True))
    a[9], wanted[9] = float("nan"), float("nan")
    out, lse = a.clone().to(device), lse_a.clone().to(device)
    merge_states_(out, lse, b.to(device), lse_b.to(device))
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), torch.logaddexp2(lse_a, lse_b))


def test_merge_rejects_other_shapes(device: torch.device) -> None:
    out, lse = torch.zeros(4, 2, 64, dtype=torch.bfloat16, device=device), torch.zeros(4, 2, device=device)
    with pytest.raises(ValueError, match="alike"):
        merge_states_(out, lse, out[:2], lse[:2])
    with pytest.raises(ValueError, match="log-sum-exps"):
        merge_states_(out, lse, out, lse.double())


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_extend_by_passes_and_token_by_token(shape: Shape, device: torch.device) -> None:
    """Several passes, one that ends within a request, a short chunk, requests without prefix between them."""
    check(make(shape, [0, 1, 30, 150, 70], [70, 64, 3, 66, 0], device), device)


def test_keys_are_cut_to_fill_the_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two requests, one of which is shorter than there are pieces, with one that has no prefix between."""
    monkeypatch.setattr(extend_plan, "MIN_PIECE", 16)
    assert count_splits(8 * 3, 132, 150) == 5
    check(make(Shape(), [150, 0, 3, 90], [64, 70, 64, 65], device), device, replace(LIMITS, capacity=1000))


@given(st.integers(1, 2000), st.integers(1, 200), st.integers(0, 100_000))
def test_splits_only_where_that_fills_the_gpu_better(works: int, processors: int, longest: int) -> None:
    splits = count_splits(works, processors, longest)
    waves = [-(-works * count // processors) / count for count in (1, splits)]
    assert 1 <= splits <= extend_plan.MAX_SPLITS
    assert splits == 1 or (waves[1] < 0.9 * waves[0] and longest // splits >= extend_plan.MIN_PIECE)


def test_extend_without_prefix_needs_no_rotated_queries(device: torch.device) -> None:
    check(make(Shape(), [0, 0], [70, 1], device), device)


def test_prefixes_beyond_the_passes_are_read_in_place(device: torch.device) -> None:
    case = make(Shape(), [150, 90, 100], [64, 64, 64], device)
    limits = replace(LIMITS, passes=2)
    cut = cut_prefixes([150, 90, 100], [64, 64, 64], limits)
    assert (len(cut.passes), cut.in_place) == (2, [1, 2])
    check(case, device, limits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        Shape(gqa=4, kv_heads=8, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64),
        Shape(gqa=5, kv_heads=8, head_dim=128, group=64, windows=Windows(64, 256, 256), page_size=64),
    ],
    ids=str,
)
def test_extend_at_size(shape: Shape, device: torch.device) -> None:
    limits = Limits(8192, 8, 32, 2240)
    check(make(shape, [0, 20_000, 3000, 4000, 1], [3000, 256, 1000, 10, 64], device), device, limits)


@pytest.mark.parametrize("shape", sampled(sampled(SHAPES, 1), 1), ids=str)
def test_prefixes_of_short_chunks(shape: Shape, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From within the sinks to several pages, more tokens than the decode kernel is given at a time."""
    monkeypatch.setattr(ragged_plan, "SHORT_BATCH", 7)
    check(make(shape, [150, 0, 1, 30], [4, 3, 2, 3], device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("gqa", [4, 8])
def test_prefixes_of_short_chunks_by_the_cuda_kernel(gqa: int, device: torch.device) -> None:
    """As a server has it: a workspace made for few running requests, more short tokens than it takes at a time."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    shape = Shape(gqa=gqa, kv_heads=4, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
    case = make(shape, [6000, 0, 9000, 4000, 300] * 4, [22, 3, 25, 20, 40] * 4, device)
    task = decode_choice.DecodeTask("cuda", [case.batch.cache], 64, shape.q_heads, shape.dtype, short_chunks=True)
    kernel = decode_choice.choose(task, max_batch=1)
    limits = Limits(8192, 8, 32, 2240)
    plan = ragged_extend_of(case, limits, device, kernel).planner.plan(
        case.batch.tables, case.batch.tables.kv_lens.tolist(), case.lengths
    )
    assert [len(short.tokens) for short in plan.short] == [134, 134]
    check(case, device, limits, kernel)


def test_short_tokens_are_bounded() -> None:
    cut = cut_prefixes([5000] * 50, [30] * 50, Limits(100_000, 1, 32, 0))
    assert len(cut.short) == MOST_SHORT // 30
    assert [span.request for span in cut.passes[0]] == [*range(34, 50)]


def test_only_short_chunks_go_token_by_token(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_plan, "SHORT_BATCH", 20)
    shape, prefixes = Shape(), [150, 0, 20, 30]
    case = make(shape, prefixes, [5, 3, 32, 33], device)
    ragged = ragged_extend_of(case, LIMITS, device)
    plan = ragged.planner.plan(case.batch.tables, prefixes, case.lengths)
    assert [len(one.spans.requests) for one in plan.passes] == [1]
    assert plan.in_place is None
    assert [len(short.tokens) for short in plan.short] == [19, 18]
    assert torch.cat([short.tokens for short in plan.short]).tolist() == [*range(5), *range(8, 40)]
    assert torch.cat([short.tables.kv_lens for short in plan.short]).tolist() == [150] * 5 + [20] * 32


def test_single_tokens_are_decoded(device: torch.device) -> None:
    """A chunk of one token is left to decode; its tables are those of a batch in which the token is stored."""
    shape = Shape()
    case = make(shape, [150, 0, 90, 31, 64], [1, 1, 64, 1, 2], device)
    tables = case.batch.tables
    ragged = ragged_extend_of(case, LIMITS, device)
    plan = ragged.planner.plan(tables, tables.kv_lens.tolist(), case.lengths)
    assert plan.decoding is not None
    assert plan.in_place is None
    assert [short.tables.kv_lens.tolist() for short in plan.short] == [[64, 64]]
    assert plan.decoding.tokens.tolist() == [0, 66]
    own = plan.decoding.tables
    assert own.kv_lens.tolist() == [151, 32]
    for name in ("page_table", "ring_row", "ring_start", "sink_block"):
        assert torch.equal(getattr(own, name), getattr(tables, name)[[0, 3]])
