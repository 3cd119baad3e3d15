"""The codec: bits that must never change, bounds of its error, and what it refuses to overflow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import (
    STRETCH,
    clip,
    clip_index,
    decode_rows,
    dequantize,
    encode_rows,
    fitted_parameters,
    pack,
    quantize,
    unpack,
)
from oscar_kernels.layout import (
    AFFINE,
    BITS,
    CODEBOOK,
    EXACT,
    FORMAT_VERSION,
    HIGH_BITS,
    SCALE_DTYPES,
    SYMMETRIC,
    RowLayout,
)

DATA = Path(__file__).parents[1] / "data"
GOLDEN = {version: json.loads((DATA / f"row_format_v{version}.json").read_text()) for version in (1, 2, 3)}
"""Rows of every version; those of version 1 have two bits, and those before version 3 are affine or exact."""
GOLDEN_192 = json.loads((DATA / "row_format_v3_192.json").read_text())
"""Rows of keys whose heads are no power of two, of every width and coding."""
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def golden_book(kv_heads: int, head_dim: int) -> Codebook:
    """The codebook of the rows of version 3, which do not hold it."""
    groups = head_dim // 4
    raw = hashlib.shake_256(b"points").digest(kv_heads * groups * 1024)
    points = torch.tensor(list(raw), dtype=torch.uint8).view(torch.int8).clamp(-127, 127)
    factor = 2.0**-6 * (1 + torch.arange(kv_heads * groups) % 5 / 8)
    return Codebook(points.view(kv_heads, groups, 256, 4), factor.view(kv_heads, groups))


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(data=st.data(), head_dim=st.sampled_from([64, 128, 192, 256]), bits=st.sampled_from(BITS))
def test_pack_and_unpack_are_inverse(data: st.DataObject, head_dim: int, bits: int) -> None:
    """And every code lies where :mod:`oscar_kernels.layout` says."""
    raw = data.draw(st.binary(min_size=head_dim, max_size=head_dim))
    codes = torch.tensor(list(raw), dtype=torch.uint8) % (1 << bits)
    packed = pack(codes, bits)
    assert len(packed) == RowLayout(1, head_dim, 32, bits=bits).code_bytes
    assert torch.equal(unpack(packed, bits), codes)
    channel = data.draw(st.integers(0, head_dim - 1))
    if bits == 4:
        byte, plane = channel % (head_dim // 2), channel // (head_dim // 2)
        assert int(packed[byte]) >> 4 * plane & 15 == int(codes[channel])
        return
    byte, plane = channel % (head_dim // 4), channel // (head_dim // 4)
    assert int(packed[byte]) >> 2 * plane & 3 == int(codes[channel]) & 3
    if bits == 3:
        high = int(packed[head_dim // 4 + 4 * (byte // 8) + byte % 4])
        assert high >> HIGH_BITS[plane] + byte // 4 % 2 & 1 == int(codes[channel]) >> 2


@settings(max_examples=50)
@given(
    data=st.data(),
    scale_dtype=st.sampled_from(list(SCALE_DTYPES.values())),
    group=st.sampled_from([32, 64, 128]),
    ratio=st.sampled_from([0.5, 0.96, 1.0]),
    gain=st.sampled_from([0.0, 0.98]),
    rows_of=st.sampled_from([(bits, coding) for coding in (AFFINE, SYMMETRIC) for bits in BITS] + [(2, CODEBOOK)]),
)
def test_a_nan_is_kept_in_its_vector(
    data: st.DataObject, scale_dtype: torch.dtype, group: int, ratio: float, gain: float, rows_of: tuple[int, str]
) -> None:
    """All of a vector with any NaNs is read back as NaN, its codes are 0, and no other vector changes."""
    bits, coding = rows_of
    layout = RowLayout(3, 128, group, scale_dtype, bits, coding=coding)
    book = golden_book(3, 128) if coding == CODEBOOK else None
    y = vectors(2, 3, 128)
    clean = encode_rows(y, layout, ratio, gain, book)
    channels = data.draw(st.sets(st.integers(0, 127), min_size=1))
    y[1, 2, sorted(channels)] = float("nan")
    rows = encode_rows(y, layout, ratio, gain, book)
    read, wanted = decode_rows(rows, layout, book), decode_rows(clean, layout, book)
    wanted[1, 2] = float("nan")
    assert torch.equal(read.isnan(), wanted.isnan())
    assert torch.equal(read.nan_to_num(), wanted.nan_to_num())
    assert (rows[1, 2 * layout.code_bytes : 3 * layout.code_bytes] == 0).all()


@settings(max_examples=30)
@given(packed=st.binary(min_size=24, max_size=24), bits=st.sampled_from(BITS))
def test_every_byte_is_codes(packed: bytes, bits: int) -> None:
    raw = torch.tensor(list(packed), dtype=torch.uint8)
    assert torch.equal(pack(unpack(raw, bits), bits), raw)


@pytest.mark.parametrize(
    ("ratio", "index"), [(0.96, 122), (0.92, 117), (1.0, None), (0.0, None), (1.5, None), (0.999, 127)]
)
def test_clip_index_of_the_paper(ratio: float, index: int | None) -> None:
    assert clip_index(128, ratio) == index


def test_clip_keeps_what_is_below_the_order_statistic() -> None:
    y = vectors(50, 128)
    clipped = clip(y, 0.92)
    assert ((clipped != y).sum(-1) == 127 - 117).all()
    tau = y.abs().sort(-1).values[:, 117:118]
    assert torch.equal(clipped, y.clamp(-tau, tau))
    assert torch.equal(clip(y, 1.0), y)
    assert (clip(torch.zeros(1, 64), 0.5) == 0).all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(1e-6, 1e6),
    offset=st.floats(-10, 10),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(SCALE_DTYPES.values())),
    levels=st.sampled_from([3, 4, 8, 16]),
)
def test_error_is_half_a_step(
    seed: int, spread: float, offset: float, group: int, dtype: torch.dtype, levels: int
) -> None:
    """|x - dequantized| <= scale / 2, widened by the rounding of scale and zero point to their dtype."""
    y = (vectors(4, 128, seed=seed) + offset) * (min(spread, 1e4) if dtype == torch.float16 else spread)
    codes, scale, zero = quantize(y, group, dtype, levels)
    assert torch.isfinite(scale).all()
    assert torch.isfinite(zero).all()
    assert int(codes.max()) < levels
    step = scale.float().repeat_interleave(group, -1)
    slack = EPSILON[dtype] * (levels - 1 + zero.float().abs()).repeat_interleave(group, -1) * 2 + 1e-5
    assert ((dequantize(codes, scale, zero) - y).abs() <= step * (0.5 + slack)).all()


def test_float16_scale_and_zero_stay_finite() -> None:
    """Ranges that float16 cannot hold, and zero points that would leave it: far from zero, nearly constant."""
    for y in (torch.full((1, 64), 3e4) + vectors(1, 64) * 1e-4, vectors(1, 64) * 1e-9, vectors(1, 64) * 1e7):
        codes, scale, zero = quantize(y, 64, torch.float16)
        assert torch.isfinite(scale).all()
        assert torch.isfinite(zero).all()
        assert (scale >= 2.0**-14).all()
        assert torch.isfinite(dequantize(codes, scale, zero)).all()


def test_constant_vectors_survive() -> None:
    for value in (0.0, 1.0, -2.5):
        codes, scale, zero = quantize(torch.full((1, 64), value), 32, torch.float32)
        assert torch.allclose(dequantize(codes, scale, zero), torch.full((1, 64), value), rtol=1e-5)


@pytest.mark.parametrize("dtype", SCALE_DTYPES.values(), ids=str)
@pytest.mark.parametrize(("head_dim", "group", "bits"), [(64, 32, 2), (128, 128, 3), (192, 64, 3), (256, 64, 4)])
def test_rows_carry_scale_and_zero_bit_for_bit(dtype: torch.dtype, head_dim: int, group: int, bits: int) -> None:
    """Quantizer and dequantizer use the same rounded parameters, so a row decodes to what quantize meant."""
    layout = RowLayout(3, head_dim, group, dtype, bits)
    y = vectors(5, 3, head_dim)
    rows = encode_rows(y, layout, 0.96)
    assert rows.shape == (5, layout.row_bytes)
    assert rows.dtype == torch.uint8
    assert torch.equal(decode_rows(rows, layout), dequantize(*quantize(clip(y, 0.96), group, dtype, 1 << bits)))


@pytest.mark.parametrize(
    "case",
    [row for golden in (*GOLDEN.values(), GOLDEN_192) for row in golden["rows"]],
    ids=lambda c: f"{c['head_dim']}-{c['scale_dtype']}-{c.get('bits', 'v1')}-{c.get('coding', AFFINE)}",
)
def test_stored_bytes_never_change(case: dict) -> None:
    """A row written by any version of this format reads the same. If this fails, FORMAT_VERSION must change."""
    assert max(GOLDEN) == GOLDEN[max(GOLDEN)]["format_version"] == FORMAT_VERSION
    bits, scale_dtype = case.get("bits", 2), SCALE_DTYPES[case["scale_dtype"]]
    exact_dtype, coding = SCALE_DTYPES[case.get("exact_dtype", "bfloat16")], case.get("coding", AFFINE)
    layout = RowLayout(case["kv_heads"], case["head_dim"], case["group_size"], scale_dtype, bits, exact_dtype, coding)
    book = golden_book(layout.kv_heads, layout.head_dim) if coding == CODEBOOK else None
    y = torch.tensor(case["input"]).view(1, case["kv_heads"], case["head_dim"])
    row = torch.tensor(list(bytes.fromhex(case["row"])), dtype=torch.uint8)[None]
    assert torch.equal(encode_rows(y, layout, case["clip"], case.get("gain", 0.0), book), row)
    assert layout.bits_per_element == case["bits_per_element"]
    if coding != AFFINE:
        assert decode_rows(row, layout, book).flatten().tolist() == case["output"]
        return
    if bits == EXACT:
        assert torch.equal(decode_rows(row, layout), y)
        return
    wanted = torch.tensor(case["codes"]).view(case["kv_heads"], case["head_dim"])
    assert torch.equal(unpack(row[0, : layout.params_offset].view(case["kv_heads"], -1), bits).long(), wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 128, 128), "kv_heads"),
        ((8, 96, 32), "head_dim"),
        ((8, 128, 16), "group_size"),
        ((8, 128, 256), "group_size"),
        ((8, 128, 48), "group_size"),
        ((8, 128, 128, torch.int8), "scale_dtype"),
        ((8, 128, 128, torch.bfloat16, 16, torch.float32), "exact_dtype must be bfloat16 or float16"),
        ((8, 128, 128, torch.bfloat16, 5), "bits must be one of 2, 3, 4, 16"),
        ((8, 128, 128, torch.bfloat16, 2, torch.bfloat16, "points"), "coding must be one of affine, symmetric, code"),
        ((8, 128, 128, torch.bfloat16, 3, torch.bfloat16, CODEBOOK), "a codebook needs 2 bits, got 3"),
        ((8, 128, 128, torch.bfloat16, 16, torch.bfloat16, SYMMETRIC), "no codes, so coding must be affine"),
    ],
)
def test_layout_rejects(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowLayout(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_left_exact_is_a_16_bit_cache(dtype: torch.dtype) -> None:
    """Every bit pattern comes back, neither clipped nor fitted; wider numbers are rounded as any cast does it."""
    layout = RowLayout(2, 128, 64, torch.float32, EXACT, dtype)
    x = torch.arange(1 << 16).to(torch.uint16).view(torch.int16).view(dtype).view(-1, 2, 128)
    rows = encode_rows(x, layout, 0.5, 0.98)
    assert (rows.shape[1], layout.row_bytes, layout.bits_per_element, layout.groups) == (512, 512, 16, 0)
    back = decode_rows(rows, layout).to(dtype)
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back.view(torch.int16)[~x.isnan()], x.view(torch.int16)[~x.isnan()])
    y = vectors(5, 2, 128) * 100
    assert torch.equal(decode_rows(encode_rows(y, layout, 1.0), layout), y.to(dtype).float())


def test_row_of_the_paper() -> None:
    layout = RowLayout(8, 128, 128)
    assert (layout.row_bytes, layout.params_offset, layout.bits_per_element) == (288, 256, 2.25)
    assert RowLayout(8, 128, 128, torch.float32).bits_per_element == 2.5
    assert [RowLayout(1, 128, 128, bits=bits).row_bytes for bits in BITS] == [36, 52, 68]
    for coding in (SYMMETRIC, CODEBOOK):
        assert RowLayout(8, 128, 128, coding=coding).bits_per_element == 2.125


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), ratio=st.sampled_from([0.84, 0.88, 0.96, 1.0]), group=st.sampled_from([32, 64, 128]),
    gain=st.sampled_from([0.95, 0.98, 1.0]), dtype=st.sampled_from(list(SCALE_DTYPES.values())),
    offset=st.sampled_from([0.0, 3.0, -20.0]),
)  # fmt: skip
def test_fitted_rows_keep_mean_and_length(
    seed: int, ratio: float, group: int, gain: float, dtype: torch.dtype, offset: float
) -> None:
    """mean x^ = mean x, and beside the means <x^, x> = gain <x, x>, whatever was clipped and however much."""
    y = vectors(8, 128, seed=seed) + offset * vectors(8, 1, seed=seed + 1)
    codes, scale, _ = quantize(clip(y, ratio), group, dtype)
    fitted, zero = fitted_parameters(y, codes, scale, gain)
    x, other = (z.double().unflatten(-1, (-1, group)) for z in (y, dequantize(codes, fitted, zero)))
    bounded = (fitted >= scale * STRETCH * 0.99) | (fitted <= scale / STRETCH * 1.01)
    # Scale and zero point are rounded; the mean is off by what that does to scale * (mean code - zero).
    slack = EPSILON[dtype] * (fitted.double() * zero.double().abs()) + 1e-5 * (1 + abs(offset))
    assert ((x.mean(-1) - other.mean(-1)).abs() <= slack).all()
    centered, back = x - x.mean(-1, keepdim=True), other - other.mean(-1, keepdim=True)
    reached = (centered * back).sum(-1) / centered.square().sum(-1)
    assert ((reached - gain).abs() <= 1.01 * EPSILON[dtype] * gain + 1e-5)[~bounded].all()
    assert bounded.double().mean() < 0.3


def test_fitted_rows_of_normal_channels() -> None:
    """What clipping takes off a normal row comes back, and the error across it is least near a ratio of 0.88."""
    y = vectors(4000, 128)
    error, length = {}, {}
    for ratio in (0.84, 0.88, 0.96, 1.0):
        codes, scale, zero = quantize(clip(y, ratio), 128)
        plain = dequantize(codes, scale, zero)
        fitted = dequantize(codes, *fitted_parameters(y, codes, scale))
        length[ratio] = float(((plain * y).sum(-1) / y.square().sum(-1)).mean())
        error[ratio] = float((fitted - y).square().mean())
        assert float(((fitted * y).sum(-1) / y.square().sum(-1) - 1).abs().max()) < 0.02
    assert length[0.84] == pytest.approx(0.859, abs=0.003)
    assert length[0.96] == pytest.approx(0.975, abs=0.003)
    # Lloyd-Max has 0.1175 and shrinks by as much: 0.1175 / (1 - 0.1175) = 0.133 is what an unbiased one can reach.
    assert error[0.88] == pytest.approx(0.132, abs=0.002)
    assert error[0.88] < error[0.84] < error[0.96] < error[1.0]


def test_fitted_scales_of_odd_groups() -> None:
    """Equal channels keep their scale; an outlier that was clipped away does not inflate its group."""
    y = torch.zeros(3, 64)
    y[1] = 5.0
    y[2] = vectors(64)
    y[2, 7] = 1e4
    codes, scale, _ = quantize(clip(y, 0.9), 32)
    fitted, fitted_zero = fitted_parameters(y, codes, scale)
    assert torch.equal(fitted[:2], scale[:2])
    assert (dequantize(codes, fitted, fitted_zero)[:2] - y[:2]).abs().max() < 5 * 2**-8
    assert float(fitted[2, 0]) <= STRETCH * 1.01 * float(scale[2, 0])
    assert float(scale[2, 0]) < 3
    rows = encode_rows(y[:, None].expand(3, 2, 64), RowLayout(2, 64, 32), 0.9, 1.0)
    assert rows.shape == (3, RowLayout(2, 64, 32).row_bytes)
    layout = RowLayout(1, 64, 32)
    assert torch.equal(encode_rows(y[:, None], layout, 0.9), encode_rows(y[:, None], layout, 0.9, 0.0))
