"""Kernels where heads of keys and of values differ in size, 192 channels among them, against float64 attention."""

from __future__ import annotations

import pytest
import test_extend as extends
import test_ragged_extend as passes
import torch
from kernel_cases import (
    OF_UNEQUAL_HEADS,
    Shape,
    assert_as_good_as,
    assert_lse,
    decode_exact,
    filled_batch,
    multiplied,
    random_transform,
    random_trees,
    random_vectors,
    verify_exact,
    with_new_tokens,
)
from store_cases import assert_correctly_rounded, assert_fitted, exact, run_both

from oscar_kernels import reference
from oscar_kernels.cache import Windows
from oscar_kernels.extend_plan import Limits
from oscar_kernels.prepared import split_matrix
from oscar_kernels.sink_logits import scale_by_sinks
from oscar_kernels.spans import Spans
from oscar_kernels.triton.decode import decode, verify
from oscar_kernels.triton.finite import make_values_finite_
from oscar_kernels.triton.prefix import copy_prefixes
from oscar_kernels.triton.sink_logits import scale_by_sinks_
from oscar_kernels.visible import words_of

MIMO = OF_UNEQUAL_HEADS[0]


def queries(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    return random_vectors((tokens, shape.q_heads, shape.head_dim), shape.dtype, 99, device)


@pytest.mark.parametrize("shape", [OF_UNEQUAL_HEADS[number] for number in (0, 1, 3)], ids=str)
def test_decode(shape: Shape, device: torch.device) -> None:
    """Ragged lengths; outputs have the channels of values, and are multiplied by a matrix of that size."""
    batch = filled_batch(shape, [39, 0, 70], device)
    q, sm_scale = queries(shape, 3, device), 0.4 * shape.head_dim**-0.5
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    wanted = [decode_exact(batch, q, sm_scale, of) for of in (torch.float64, shape.dtype)]
    out = decode(batch.cache, batch.tables, q, sm_scale, lse=lse)
    assert out.shape == (3, shape.q_heads, shape.value_dim)
    assert_lse(lse, batch, q, sm_scale)
    assert_as_good_as(out, *wanted)
    matrix = random_transform(shape.value_dim, 3, shape.kv_heads)[1].to(device)
    out = decode(batch.cache, batch.tables, q, sm_scale, reading=split_matrix(matrix, shape.dtype))
    assert_as_good_as(out, *(multiplied(x, matrix) for x in wanted))


@pytest.mark.parametrize("shape", OF_UNEQUAL_HEADS[2:3], ids=str)
def test_verification(shape: Shape, device: torch.device) -> None:
    batch = with_new_tokens(filled_batch(shape, [50], device), 3)
    seen, q, sm_scale = random_trees(1, 3), queries(shape, 3, device), 0.4 * shape.head_dim**-0.5
    out = verify(batch.cache, batch.tables, words_of(seen).to(device), q, sm_scale)
    assert_as_good_as(out, *(verify_exact(batch, seen, q, sm_scale, of) for of in (torch.float64, shape.dtype)))


@pytest.mark.parametrize("shape", [OF_UNEQUAL_HEADS[number] for number in (1, 4)], ids=str)
def test_extend(shape: Shape, device: torch.device) -> None:
    """Chunks on prefixes that the kernel reads in place."""
    extends.check(extends.make(shape, [70, 0], [9, 33], device))


@pytest.mark.parametrize("limits", [passes.LIMITS, passes.JOINED], ids=["passes", "joined"])
def test_prompts_through_a_workspace(limits: Limits, device: torch.device) -> None:
    """A stock kernel attends to keys and values of their own sizes; prefixes are those of the cache."""
    shape = OF_UNEQUAL_HEADS[5] if limits.joined else MIMO
    passes.check(extends.make(shape, [90, 0, 30], [33, 5, 4], device), device, limits)
    batch = filled_batch(shape, [60], device)
    indptr = torch.tensor([0, 60], dtype=torch.int32, device=device)
    copied = [torch.empty(60, 2, of, dtype=shape.dtype, device=device) for of in (shape.head_dim, shape.value_dim)]
    copy_prefixes(batch.cache, batch.tables, Spans(indptr[:1].clone(), indptr[:1].clone(), indptr), *copied)
    for found, wanted in zip(copied, reference.gather(batch.cache, batch.tables, 0, 60), strict=True):
        torch.testing.assert_close(found, wanted.to(shape.dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "gain"), list(zip(OF_UNEQUAL_HEADS, (0.98, 0.0, 0.0, 0.98, 0.98), strict=False)), ids=str
)
def test_store(shape: Shape, gain: float, device: torch.device) -> None:
    """Rows of either side, windows, and queries turned by the matrix of the keys."""
    caches, slots, (q, k, v), (rk, rv), q_rot = run_both(shape, 21, 0.96, device, rotate_v=True, gain=gain)
    for x, rotation, name in ((k, rk, "k"), (v, rv, "v")):
        layout, book = shape.layout_of(name), caches[0].k_codebook if name == "k" else None
        rows, wanted = (getattr(cache, f"{name}_rows")[slots.row] for cache in caches)
        if layout.exact:
            got, want = (of.view(shape.dtype).float() for of in (rows, wanted))
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-4)
        else:
            codes = slice(0, layout.params_offset)
            assert (rows[:, codes] != wanted[:, codes]).double().mean() < 2e-3
            if gain:
                plain = run_both(shape, 21, 0.96, device, rotate_v=True)[0][0]
                assert_fitted(
                    rows, getattr(plain, f"{name}_rows")[slots.row], exact(x, rotation), layout, gain, book=book
                )
            else:
                assert_correctly_rounded(rows, exact(x, rotation), layout, 0.96, book=book)
        for window in ("ring", "sink"):
            got, want = (getattr(cache, f"{name}_{window}").float() for cache in caches)
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-4)
    torch.testing.assert_close(q_rot.double(), exact(q, rk), rtol=2.0**-7, atol=1e-4)


def test_sink_logits_and_values_that_are_no_numbers(device: torch.device) -> None:
    shape, tokens = MIMO, 5
    q = queries(shape, tokens, device)
    out = random_vectors((tokens, shape.q_heads, shape.value_dim), shape.dtype, 4, device)
    lse, sinks = torch.randn(tokens, shape.q_heads, device=device), torch.randn(shape.q_heads, device=device)
    center = torch.randn(shape.kv_heads, shape.head_dim, device=device)
    wanted = scale_by_sinks(out, lse, sinks, q, center, 0.1)
    torch.testing.assert_close(scale_by_sinks_(out, lse, sinks, q, center, 0.1), wanted, rtol=2**-7, atol=1e-3)
    k = random_vectors((tokens, shape.kv_heads, shape.head_dim), shape.dtype, 1, device)
    v = random_vectors((tokens, shape.kv_heads, shape.value_dim), shape.dtype, 2, device)
    v[3, 1, -1] = float("nan")
    make_values_finite_(k, v)
    assert v.isfinite().all()
    broken = torch.zeros(tokens, shape.kv_heads, dtype=torch.bool, device=device)
    broken[3, 1] = True
    assert torch.equal(k.isnan().all(-1), broken)
    assert torch.equal(k.isnan().any(-1), broken)


def test_windows_only(device: torch.device) -> None:
    """What is read at key offsets in place of those of values is NaN, or somebody else's."""
    shape = Shape(head_dim=192, v_head_dim=128, windows=Windows(sink=16, recent=48, ring=48))
    batch, q = filled_batch(shape, [50, 64], device), queries(shape, 2, device)
    wanted = [decode_exact(batch, q, 0.03, of) for of in (torch.float64, shape.dtype)]
    assert_as_good_as(decode(batch.cache, batch.tables, q, 0.03), *wanted)
