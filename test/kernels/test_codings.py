"""Codes without a zero point: codebooks and symmetric codes, by what they lose and by what they are indifferent to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.layout import BITS, CODEBOOK, SCALE_DTYPES, SYMMETRIC, RowLayout
from oscar_kernels.scales import STEP, STRETCH, dequantize_symmetric, quantize_symmetric


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_book(kv_heads: int, head_dim: int, seed: int = 0) -> Codebook:
    return Codebook.from_points(vectors(kv_heads, head_dim // 4, 256, 4, seed=seed))


DTYPES = st.sampled_from(list(SCALE_DTYPES.values()))


@settings(max_examples=30)
@example(seed=25, bits=4, dtype=torch.bfloat16, gain=0.0)  # a number in the middle between two codes
@given(seed=st.integers(0, 1000), bits=st.sampled_from(BITS), dtype=DTYPES, gain=st.sampled_from([0.0, 0.98]))
def test_heads_and_signs_do_not_matter(seed: int, bits: int, dtype: torch.dtype, gain: float) -> None:
    """Heads in another order are stored in that order; what is negated is read back negated, ties aside."""
    y = vectors(4, 3, 64, seed=seed)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    layout = RowLayout(3, 64, 32, dtype, bits, coding=SYMMETRIC)
    read = decode_rows(encode_rows(y, layout, 1.0, gain), layout)
    assert torch.equal(decode_rows(encode_rows(y[:, order], layout, 1.0, gain), layout), read[:, order])
    kept, negated = (decode_rows(encode_rows(x, layout, 1.0, 0.0), layout) for x in (y, -y))
    ties = kept != -negated
    assert torch.allclose((y - kept).abs()[ties], (y + negated).abs()[ties])
    if not ties.any():
        assert torch.equal(decode_rows(encode_rows(-y, layout, 1.0, gain), layout), -read)
    book, layout = random_book(3, 64, seed), RowLayout(3, 64, 32, dtype, coding=CODEBOOK)
    read = decode_rows(encode_rows(y, layout, 1.0, gain, book), layout, book)
    moved = Codebook(book.points[order].contiguous(), book.factor[order].contiguous())
    assert torch.equal(decode_rows(encode_rows(y[:, order], layout, 1.0, gain, moved), layout, moved), read[:, order])
    one = RowLayout(1, 64, 32, dtype, coding=CODEBOOK)
    own = book.of_heads(slice(1, 2))
    assert torch.equal(decode_rows(encode_rows(y[:, 1:2], one, 1.0, gain, own), one, own), read[:, 1:2])


def test_whether_points_are_shared_is_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing can be asked of a GPU."""
    one = random_book(1, 64)
    same = Codebook(one.points[:, :1].repeat(2, 16, 1, 1), one.factor.repeat(2, 1))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("asked while a graph is captured"))
    assert (same.shared, one.shared) == (True, False)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), exponent=st.integers(-12, 12), bits=st.sampled_from(BITS))
def test_powers_of_two_change_scales_alone(seed: int, exponent: int, bits: int) -> None:
    y, book = vectors(3, 1, 64, seed=seed), random_book(1, 64, seed)
    for layout, points in (
        (RowLayout(1, 64, 32, bits=bits, coding=SYMMETRIC), None),
        (RowLayout(1, 64, 32, coding=CODEBOOK), book),
    ):
        rows, other = (encode_rows(x, layout, 0.96, 0.98, points) for x in (y, y * 2.0**exponent))
        assert torch.equal(rows[:, : layout.params_offset], other[:, : layout.params_offset])
        read = decode_rows(rows, layout, points)
        assert torch.equal(decode_rows(other, layout, points), read * 2.0**exponent)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), gain=st.sampled_from([0.9, 0.98, 1.0]))
def test_fitted_scales_have_the_length_of_the_gain(seed: int, gain: float) -> None:
    """<x^, y> = gain <y, y> in every group, where the scale is not bounded."""
    y, book = vectors(8, 2, 64, seed=seed), random_book(2, 64, seed)
    for layout, points in (
        (RowLayout(2, 64, 32, torch.float32, coding=SYMMETRIC), None),
        (RowLayout(2, 64, 32, torch.float32, coding=CODEBOOK), book),
    ):
        plain, read = (decode_rows(encode_rows(y, layout, 0.96, g, points), layout, points) for g in (0.0, gain))
        read, before, x = (z.double().unflatten(-1, (layout.groups, -1)) for z in (read, plain, y))
        stretched = read.norm(dim=-1) / before.norm(dim=-1)
        assert (stretched <= STRETCH * 1.0001).all()
        free = (stretched < STRETCH * 0.999) & (stretched > 1.001 / STRETCH)
        reached = (read * x).sum(-1) / x.square().sum(-1)
        assert ((reached - gain).abs() < 1e-5)[free].all()
        assert free.double().mean() > 0.9


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_the_nearest_point_is_found(seed: int) -> None:
    book, x = random_book(2, 64, seed), vectors(5, 2, 64, seed=seed + 1)
    distance = (x.unflatten(-1, (-1, 1, 4)).double() - book.values.double()).square().sum(-1)
    found = distance.gather(-1, book.nearest(x)[..., None].long())[..., 0]
    assert (found <= distance.amin(-1) + 1e-5).all()


def test_of_equal_points_the_lowest_is_taken() -> None:
    points = vectors(1, 16, 256, 4).repeat_interleave(2, 2)[:, :, :256]
    book, x = Codebook.from_points(points), vectors(50, 1, 64, seed=1)
    assert (book.nearest(x) % 2 == 0).all()
    assert (Codebook.from_points(torch.zeros(1, 16, 256, 4)).nearest(x) == 0).all()


def test_points_are_rounded_to_the_largest() -> None:
    """To whole numbers of which the largest is 127, half to even; zeros have the least factor."""
    points = torch.zeros(1, 16, 256, 4)
    points[0, 0, 7] = torch.tensor([-254.0, 1.0, 3.0, 0.9])
    book = Codebook.from_points(points)
    assert book.points[0, 0, 7].tolist() == [-127, 0, 2, 0]
    assert (float(book.factor[0, 0]), float(book.factor[0, 1])) == (2.0, pytest.approx(1e-12))
    assert book.values[0, 0, 7].tolist() == [-254.0, 0.0, 4.0, 0.0]
    normal = vectors(2, 16, 256, 4)
    error = (Codebook.from_points(normal).values - normal).abs().amax((-2, -1))
    assert (error <= normal.abs().amax((-2, -1)) / 253).all()


def test_loss_on_normal_channels() -> None:
    """The step is the best uniform one (Max 1960: 0.1188, 0.03744, 0.01154 of the variance), and near the best here."""
    y = vectors(2000, 128)
    for bits, known in zip(BITS, (0.1188, 0.03744, 0.01154), strict=True):
        codes, scale = quantize_symmetric(y, 128, torch.float32, bits)
        loss = float((dequantize_symmetric(codes, scale, bits) - y).square().mean())
        assert loss == pytest.approx(known, rel=0.02)
        assert torch.allclose(scale[:, 0], STEP[bits] * y.square().mean(-1).sqrt())


@pytest.mark.parametrize("dtype", SCALE_DTYPES.values(), ids=str)
def test_odd_vectors_survive(dtype: torch.dtype) -> None:
    """Zeros, tiny and huge numbers are read back finite, in every scale dtype."""
    y, book = torch.zeros(4, 1, 64), random_book(1, 64)
    y[1], y[2], y[3] = vectors(1, 64) * 1e-12, vectors(1, 64) * 1e7, 3.0
    layouts = [(RowLayout(1, 64, 32, dtype, bits, coding=SYMMETRIC), None) for bits in BITS]
    for layout, points in [*layouts, (RowLayout(1, 64, 32, dtype, coding=CODEBOOK), book)]:
        for gain in (0.0, 1.0):
            read = decode_rows(encode_rows(y, layout, 0.9, gain, points), layout, points)
            assert read.isfinite().all()
            assert float(read[0].abs().max()) < 1e-3
            assert ((read[3] - 3).abs() < 3).all()


def test_rows_of_a_codebook_need_it() -> None:
    layout = RowLayout(1, 64, 32, coding=CODEBOOK)
    with pytest.raises(ValueError, match="rows of a codebook need it"):
        encode_rows(vectors(1, 1, 64), layout, 1.0)
    with pytest.raises(ValueError, match="rows of a codebook need it"):
        decode_rows(torch.zeros(1, 18, dtype=torch.uint8), layout)


@pytest.mark.parametrize(
    ("points", "factor", "message"),
    [
        (torch.zeros(1, 16, 256, 4), torch.ones(1, 16), "must be int8"),
        (torch.zeros(1, 16, 255, 4, dtype=torch.int8), torch.ones(1, 16), "must be int8"),
        (torch.zeros(1, 16, 256, 4, dtype=torch.int8), torch.ones(1, 8), r"must be float32 \[1, 16\]"),
        (torch.zeros(1, 16, 256, 4, dtype=torch.int8), torch.zeros(1, 16), "positive and finite"),
        (torch.zeros(1, 16, 4, 256, dtype=torch.int8).mT, torch.ones(1, 16), "contiguous"),
    ],
)
def test_books_that_do_not_fit_are_refused(points: torch.Tensor, factor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Codebook(points, factor)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="must be finite"):
        Codebook.from_points(torch.full((1, 16, 256, 4), torch.nan))
