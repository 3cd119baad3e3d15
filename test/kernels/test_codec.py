"""The codec: bits that must never change, bounds of its error, and what it refuses to overflow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kernels.codec import clip, clip_index, decode_rows, dequantize, encode_rows, pack, quantize, unpack
from oscar_kernels.layout import FORMAT_VERSION, SCALE_DTYPES, RowLayout

GOLDEN = Path(__file__).parents[1] / "data" / "row_format_v1.json"
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), head_dim=st.sampled_from([64, 128, 256]))
def test_pack_and_unpack_are_inverse(data: st.DataObject, head_dim: int) -> None:
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=head_dim, max_size=head_dim)))
    codes = codes.to(torch.uint8)
    packed = pack(codes)
    assert torch.equal(unpack(packed), codes)
    channel = data.draw(st.integers(0, head_dim - 1))
    byte, plane = channel % (head_dim // 4), channel // (head_dim // 4)
    assert int(packed[byte]) >> 2 * plane & 3 == int(codes[channel])


@settings(deadline=None, max_examples=30)
@given(packed=st.binary(min_size=16, max_size=16))
def test_every_byte_is_four_codes(packed: bytes) -> None:
    raw = torch.tensor(list(packed), dtype=torch.uint8)
    assert torch.equal(pack(unpack(raw)), raw)


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


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(1e-6, 1e6),
    offset=st.floats(-10, 10),
    group=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(list(SCALE_DTYPES.values())),
)
def test_error_is_half_a_step(seed: int, spread: float, offset: float, group: int, dtype: torch.dtype) -> None:
    """|x - dequantized| <= scale / 2, widened by the rounding of scale and zero point to their dtype."""
    y = (vectors(4, 128, seed=seed) + offset) * (min(spread, 1e4) if dtype == torch.float16 else spread)
    codes, scale, zero = quantize(y, group, dtype)
    assert torch.isfinite(scale).all()
    assert torch.isfinite(zero).all()
    step = scale.float().repeat_interleave(group, -1)
    slack = EPSILON[dtype] * (3 + zero.float().abs()).repeat_interleave(group, -1) * 2 + 1e-5
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
@pytest.mark.parametrize(("head_dim", "group"), [(64, 32), (128, 128), (256, 64)])
def test_rows_carry_scale_and_zero_bit_for_bit(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Quantizer and dequantizer use the same rounded parameters, so a row decodes to what quantize meant."""
    layout = RowLayout(3, head_dim, group, dtype)
    y = vectors(5, 3, head_dim)
    rows = encode_rows(y, layout, 0.96)
    assert rows.shape == (5, layout.row_bytes)
    assert rows.dtype == torch.uint8
    assert torch.equal(decode_rows(rows, layout), dequantize(*quantize(clip(y, 0.96), group, dtype)))


@pytest.mark.parametrize(
    "case", json.loads(GOLDEN.read_text())["rows"], ids=lambda c: f"{c['head_dim']}-{c['scale_dtype']}"
)
def test_stored_bytes_never_change(case: dict) -> None:
    """A row written by any version of this format reads the same. If this fails, FORMAT_VERSION must change."""
    assert json.loads(GOLDEN.read_text())["format_version"] == FORMAT_VERSION
    layout = RowLayout(case["kv_heads"], case["head_dim"], case["group_size"], SCALE_DTYPES[case["scale_dtype"]])
    y = torch.tensor(case["input"]).view(1, case["kv_heads"], case["head_dim"])
    row = torch.tensor(list(bytes.fromhex(case["row"])), dtype=torch.uint8)[None]
    assert torch.equal(encode_rows(y, layout, case["clip"]), row)
    assert layout.bits_per_element == case["bits_per_element"]
    wanted = torch.tensor(case["codes"]).view(case["kv_heads"], case["head_dim"])
    assert torch.equal(unpack(row[0, : layout.params_offset].view(case["kv_heads"], -1)).long(), wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 128, 128), "kv_heads"),
        ((8, 96, 32), "head_dim"),
        ((8, 128, 16), "group_size"),
        ((8, 128, 256), "group_size"),
        ((8, 128, 48), "group_size"),
        ((8, 128, 128, torch.int8), "scale_dtype"),
    ],
)
def test_layout_rejects(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowLayout(*arguments)


def test_row_of_the_paper() -> None:
    layout = RowLayout(8, 128, 128)
    assert (layout.row_bytes, layout.params_offset, layout.bits_per_element) == (288, 256, 2.25)
    assert RowLayout(8, 128, 128, torch.float32).bits_per_element == 2.5
