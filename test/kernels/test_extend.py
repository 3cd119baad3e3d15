"""The extend kernel against float64 attention over prefix and chunk."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_cases import (
    OF_16_BITS,
    OF_EVERY_WIDTH,
    OF_OTHER_CODINGS,
    Batch,
    Shape,
    assert_as_good_as,
    attend,
    filled_batch,
    poison,
    random_rotation,
    random_vectors,
    sampled,
)

from oscar_kernels import reference
from oscar_kernels.cache import Chunks, Windows
from oscar_kernels.codec import encode_rows
from oscar_kernels.prepared import split_matrix
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.finite import make_values_finite_
from oscar_kernels.triton.rotate import rotate

SHAPES = [
    Shape(),
    Shape(gqa=1, kv_heads=1, head_dim=128, group=128, page_size=64),
    Shape(gqa=5, kv_heads=2, head_dim=128, group=32, dtype=torch.float16, scale_dtype=torch.float16),
    Shape(gqa=16, kv_heads=1, head_dim=256, group=32, scale_dtype=torch.float32),
    Shape(windows=Windows(0, 0, 0)),
    Shape(windows=Windows(0, 24, 24)),
    Shape(windows=Windows(16, 0, 8), page_size=32),
    *OF_EVERY_WIDTH,
    *OF_16_BITS,
    *OF_OTHER_CODINGS,
]


@dataclass(frozen=True)
class Case:
    batch: Batch
    lengths: list[int]
    indptr: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotation: torch.Tensor
    q_rot: torch.Tensor

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.q, self.k, self.v, self.indptr)


def make(shape: Shape, prefixes: list[int], lengths: list[int], device: torch.device, ring_starts=None) -> Case:
    batch = filled_batch(shape, prefixes, device, ring_starts)
    tokens, heads = sum(lengths), shape.q_heads + 2 * shape.kv_heads
    # Where heads have one size, slices of one projection, as a model hands them over.
    fused = random_vectors((tokens, heads, max(shape.head_dim, shape.value_dim)), shape.dtype, 50, device)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    q, k, v = q[..., : shape.head_dim], k[..., : shape.head_dim], v[..., : shape.value_dim]
    rotation = random_rotation(shape.head_dim, 4, device)
    indptr = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return Case(batch, lengths, indptr, q, k, v, rotation, rotate(q, split_matrix(rotation, q.dtype)))


def exact(case: Case, sm_scale: float, dtype: torch.dtype, chunk: bool = True) -> torch.Tensor:
    """Attention in ``dtype``: rotated queries on the prefix, plain ones on the chunk, by joining both halves.

    [q_rot, q] . [k, 0] scores a cached key, [q_rot, q] . [0, k] one of the chunk.
    """
    out, begin = [], 0
    for request, length in enumerate(case.lengths):
        kv_len = int(case.batch.tables.kv_lens[request])
        k, v = reference.gather(case.batch.cache, case.batch.tables, request, kv_len)
        span = slice(begin, begin + length)
        begin += length
        keys, values = torch.cat([k, torch.zeros_like(k)], -1), v
        if chunk:
            own = torch.cat([torch.zeros_like(case.k[span]), case.k[span]], -1)
            keys, values = torch.cat([keys, own]), torch.cat([v, case.v[span]])
        q = torch.cat([case.q_rot[span], case.q[span]], -1)
        position = torch.arange(len(keys), device=q.device) - kv_len
        hidden = position > torch.arange(length, device=q.device)[:, None]
        nothing = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype, device=q.device)
        out.append(attend(q, keys, values, sm_scale, dtype, hidden) if len(keys) else nothing)
    return torch.cat(out)


def check(case: Case, **options) -> torch.Tensor:
    sm_scale = 0.4 * case.q.shape[-1] ** -0.5
    out = extend(case.batch.cache, case.batch.tables, case.chunks, case.q_rot, sm_scale, **options)
    assert out.dtype == case.q.dtype
    assert_as_good_as(out, exact(case, sm_scale, torch.float64), exact(case, sm_scale, case.q.dtype))
    return out


@pytest.mark.parametrize("shape", sampled(SHAPES, 1), ids=str)
def test_prefixes_and_chunks_of_any_length(shape: Shape, device: torch.device) -> None:
    """No prefix, a prefix inside the windows, a long one; chunks of one token, of a few tiles, an empty one."""
    check(make(shape, [0, 1, 30, 150, 70], [70, 1, 33, 3, 0], device))


def test_ring_holds_only_what_this_request_wrote(device: torch.device) -> None:
    check(make(Shape(), [150, 150, 150], [5, 40, 1], device, ring_starts=[150, 140, 1]))


def test_agrees_with_the_reference(device: torch.device) -> None:
    case = make(Shape(), [0, 100], [40, 20], device)
    want = reference.extend(case.batch.cache, case.batch.tables, case.chunks, case.rotation, 0.1)
    out = torch.full_like(case.q, 7.0)
    got = extend(case.batch.cache, case.batch.tables, case.chunks, case.q_rot, 0.1, out=out)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_prefix_only_merges_with_the_chunk(device: torch.device) -> None:
    """Prefix and chunk attended apart and merged by log-sum-exp equal one pass over both."""
    case = make(Shape(dtype=torch.float16), [0, 3, 150], [20, 30, 40], device)
    cache, tables, q = case.batch.cache, case.batch.tables, case.q
    both = check(case).float()
    part = torch.full(q.shape[:2], float("nan"), device=device)
    prefix = extend(cache, tables, case.chunks, case.q_rot, 0.05, lse=part, prefix_only=True)
    assert (prefix[:20] == 0).all()
    assert (part[:20] == float("-inf")).all()
    empty = filled_batch(case.batch.shape, [0, 0, 0], device)
    own_lse = torch.full(q.shape[:2], float("nan"), device=device)
    own = extend(empty.cache, empty.tables, case.chunks, case.q_rot, 0.05, lse=own_lse)
    weight = torch.exp2(part - torch.logaddexp2(part, own_lse))[..., None]
    merged = weight * prefix.float() + (1 - weight) * own.float()
    torch.testing.assert_close(merged, both, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("group", [32, 64])
def test_equal_values_count(group: int, device: torch.device) -> None:
    """Tokens whose values are constant have tiny scales: they weigh what their logits say nevertheless."""
    shape = Shape(kv_heads=1, gqa=2, group=group, windows=Windows(0, 0, 0))
    case = make(shape, [8], [3], device)
    values = random_vectors((8, 1, 64), torch.float32, 5, device)
    values[::2] = 1.0
    slot = int(case.batch.tables.page_table[0, 0]) * shape.page_size
    case.batch.cache.v_rows[slot : slot + 8] = encode_rows(values, shape.value_layout, 1.0)
    case.q.zero_()
    case.q_rot.zero_()
    check(case)


@pytest.mark.parametrize("side", ["k_rows", "v_rows"])
def test_a_nan_reaches_the_heads_that_read_it(side: str, device: torch.device) -> None:
    case = make(Shape(), [100, 70], [5, 3], device)
    clean = check(case)
    poison(case.batch, side, request=0, position=60)
    sm_scale = 0.4 * case.q.shape[-1] ** -0.5
    out = extend(case.batch.cache, case.batch.tables, case.chunks, case.q_rot, sm_scale)
    heads = slice(-case.batch.shape.gqa, None)
    assert out[:5, heads].isnan().all()
    out[:5, heads] = clean[:5, heads]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
def test_a_chunk_token_that_is_no_number_is_told_to_later_ones_only(number: float, device: torch.device) -> None:
    """Its query shares a power of two, and its value a tile, with tokens before it."""
    case = make(Shape(), [100, 70], [9, 5], device)
    clean = check(case)
    case.v[6, -1, 3] = case.q_rot[6, -1, 3] = number
    make_values_finite_(case.k, case.v)
    sm_scale = 0.4 * case.q.shape[-1] ** -0.5
    out = extend(case.batch.cache, case.batch.tables, case.chunks, case.q_rot, sm_scale)
    assert out[6:9, -case.batch.shape.gqa :].isnan().all()
    others = torch.arange(14, device=device) < 6
    others[9:] = True
    torch.testing.assert_close(out[others], clean[others], rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("gqa", [1, 4, 5])
def test_extend_at_size(gqa: int, device: torch.device) -> None:
    shape = Shape(gqa=gqa, kv_heads=8, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
    check(make(shape, [0, 20_000, 3000, 1], [3000, 256, 1000, 1], device))
