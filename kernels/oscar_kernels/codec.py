"""The codec of rows in plain torch, of 2, 3, 4 bits or left exact: the specification that kernels are tested against.

One head of one token, y of ``head_dim`` channels, already rotated (paper, section 3 and appendix A.5):

1. clip: tau is the order statistic of |y| at ascending index min(floor(ratio * head_dim), head_dim - 1);
   y is clamped to [-tau, tau]. A ratio of 1 does not clip.
2. per group of ``group_size`` consecutive channels: scale = max(max - min, 1e-8) / (2^bits - 1) and
   zero = -min / scale, each rounded to the stored dtype *before* it is used, so that quantizer and dequantizer agree;
   code = floor(y / scale + zero + 0.5) clamped to 0..2^bits - 1.
3. with a gain (recipe "plus"): the codes stay, scale and zero point of a group are replaced by those with which what is
   read back has the mean of what was stored, and along it the length that the gain says; see :func:`fitted_parameters`.
4. dequantized: scale * (code - zero).

Coding symmetric has no zero point: clipped as above, then scale = max(rms of the group * STEP[bits], 1e-8), rounded to
the stored dtype, and code = floor(y / scale + 2^bits / 2) clamped to 0..2^bits - 1. Dequantized: scale * (code -
(2^bits - 1) / 2). Coding codebook does not clip: scale = max(rms of the head, 1e-8), and a code is the index of the
point nearest to four channels of y / scale, the lowest of equals. Dequantized: scale * point. With a gain both
replace the scale, see :func:`fitted_scale`.

All arithmetic is float32 whatever the input dtype. A vector with a NaN is stored as NaN scales and zero points with
codes of 0: all of it, and nothing of other vectors, is read back as NaN, so attention loses a NaN no more than in a
16-bit cache.

With 16 bits nothing of this happens: y is rounded to the row's dtype, to nearest even, as a 16-bit cache stores it.
"""

from __future__ import annotations

import math

import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.layout import AFFINE, CODEBOOK, HIGH_BITS, RowLayout
from oscar_kernels.scales import (
    MIN_RANGE,
    STRETCH,
    dequantize_symmetric,
    fitted_scale,
    normal,
    quantize_symmetric,
    rms,
)


def clip_index(head_dim: int, ratio: float) -> int | None:
    """Ascending index of the clip threshold among the ``head_dim`` sorted magnitudes; None where nothing clips.

    >>> clip_index(128, 0.96), clip_index(128, 0.92), clip_index(128, 1.0)
    (122, 117, None)
    """
    if ratio <= 0 or ratio >= 1:
        return None
    return min(math.floor(ratio * head_dim), head_dim - 1)


def clip_rank(head_dim: int, ratio: float) -> int:
    """Rank of the clip threshold counted from the largest magnitude (1 is the largest); 0 where nothing clips."""
    index = clip_index(head_dim, ratio)
    return 0 if index is None else head_dim - index


def clip(y: torch.Tensor, ratio: float) -> torch.Tensor:
    """Clamp every head of every token to its own order statistic.

    Args:
        y: [..., head_dim], any float dtype.
        ratio: clip ratio; values <= 0 or >= 1 do not clip.

    Returns:
        [..., head_dim] float32.
    """
    y = y.float()
    index = clip_index(y.shape[-1], ratio)
    if index is None:
        return y
    tau = y.abs().sort(dim=-1).values[..., index : index + 1]
    return torch.maximum(torch.minimum(y, tau), -tau)


def quantize(
    y: torch.Tensor, group_size: int, scale_dtype: torch.dtype = torch.bfloat16, levels: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric quantization per group of channels.

    Args:
        y: [..., head_dim], rotated and clipped.
        group_size: channels per group; divides head_dim.
        scale_dtype: dtype in which scale and zero point are kept.
        levels: values that a code can have; those of :class:`~oscar_kernels.layout.RowLayout` are powers of two.

    Returns:
        codes uint8 [..., head_dim] in 0..levels - 1, scale and zero point [..., groups] in ``scale_dtype``. Of a vector
        with a NaN, codes are 0 and the rest is NaN.
    """
    broken = y.isnan().any(-1, keepdim=True)
    grouped = y.float().unflatten(-1, (-1, group_size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (high - low).clamp_min(MIN_RANGE) / (levels - 1)
    if scale_dtype == torch.float16:
        # float16 ends at 65504: a scale this large keeps zero = -low / scale finite.
        scale = torch.maximum(scale, torch.maximum(low.abs(), high.abs()) / 32768)
    scale = normal(scale, scale_dtype).to(scale_dtype)
    zero = (-low / scale.float()).to(scale_dtype)
    codes = (grouped / scale.float()[..., None] + zero.float()[..., None] + 0.5).floor()
    codes = codes.flatten(-2).masked_fill(broken, 0).clamp(0, levels - 1).to(torch.uint8)
    return codes, scale.masked_fill(broken, math.nan), zero.masked_fill(broken, math.nan)


def fitted_parameters(
    y: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, gain: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point fitted to a group's codes: an unbiased estimate along what they stand for, times ``gain``.

    With x^ = scale (code - zero) and means over a group,

        scale = gain sum (y - mean y)^2 / sum (code - mean code)(y - mean y),    zero = mean code - mean y / scale

    give mean x^ = mean y and, the means aside, <x^, y> = gain <y, y>. With a gain of 1 the error has no component along
    y, where clipping and coarse levels put a good part of it, and none along the group-constant Walsh row. (The factor
    is that of RaBitQ's estimator, Gao and Long 2024, arXiv 2405.12497; the zero point is fitted too.) The scale is
    bounded by :data:`STRETCH`; a group of equal codes keeps its scale.

    Args:
        y: [..., head_dim], rotated, not clipped.
        codes: uint8 [..., head_dim], of :func:`quantize`.
        scale: [..., groups], of :func:`quantize`; its dtype is that of the results.
        gain: length along y that is read back, relative to that of y.

    Returns:
        scale and zero point, [..., groups].
    """
    groups, given = scale.shape[-1], scale.double()
    grouped, levels = (x.double().unflatten(-1, (groups, -1)) for x in (y.float(), codes))
    mean, mean_level = grouped.mean(-1), levels.mean(-1)
    grouped, levels = grouped - mean[..., None], levels - mean_level[..., None]
    along = (levels * grouped).sum(-1)
    fitted = torch.where(along > 0, gain * grouped.square().sum(-1) / along, given)
    fitted = fitted.clamp(given / STRETCH, given * STRETCH)
    stored = normal(fitted, scale.dtype).float().to(scale.dtype)
    return stored, (mean_level - mean / stored.double()).float().to(scale.dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`quantize`.

    Args:
        codes: uint8 [..., head_dim].
        scale, zero: [..., groups].

    Returns:
        float32 [..., head_dim].
    """
    grouped = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return (scale.float()[..., None] * (grouped - zero.float()[..., None])).flatten(-2)


def pack(codes: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """Codes of a head as its code bytes (:mod:`oscar_kernels.layout`): uint8 [..., head_dim] -> [..., code_bytes]."""
    if bits == 3:
        high = (codes >> 2).unflatten(-1, (4, -1, 2, 4))
        at = torch.tensor(HIGH_BITS, dtype=torch.uint8, device=codes.device)[:, None] + _halves(codes)
        return torch.cat(
            [pack(codes & 3), (high << at[:, None, :, None]).sum((-4, -2), dtype=torch.uint8).flatten(-2)], -1
        )
    planes = codes.unflatten(-1, (8 // bits, -1))
    return (planes << _shifts(bits, codes)).sum(-2, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """Inverse of :func:`pack`: uint8 [..., code_bytes] -> uint8 [..., head_dim]."""
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        words = high.unflatten(-1, (-1, 4))
        spread = [torch.stack([words >> at + half & 1 for half in range(2)], -2) for at in HIGH_BITS]
        return unpack(low) | torch.stack(spread, -4).flatten(-4) << 2
    # By numbers, of which a CPU makes far shorter work than of a tensor of shifts.
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -2).flatten(-2)


def _shifts(bits: int, like: torch.Tensor) -> torch.Tensor:
    """Bit at which each plane's codes begin, [planes, 1]."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)[:, None]


def _halves(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(2, dtype=torch.uint8, device=like.device)


def encode_rows(
    y: torch.Tensor, layout: RowLayout, clip_ratio: float, gain: float = 0.0, codebook: Codebook | None = None
) -> torch.Tensor:
    """Clip, quantize and pack tokens into history rows; round them to 16 bits where the rows are exact.

    Args:
        y: [tokens, kv_heads, head_dim], rotated.
        layout: row geometry.
        clip_ratio: see :func:`clip`; of affine and symmetric codes only.
        gain: of :func:`fitted_parameters` or :func:`fitted_scale`; 0 keeps the first scales and zero points. Of codes
            only.
        codebook: of rows with that coding.

    Returns:
        uint8 [tokens, row_bytes].

    Raises:
        ValueError: the rows need a codebook that is not given.
    """
    if layout.exact:
        return y.to(layout.exact_dtype).flatten(1).contiguous().view(torch.uint8)
    dtype = layout.scale_dtype
    if layout.coding == CODEBOOK:
        y, book = y.float(), _given(codebook)
        broken = y.isnan().any(-1, keepdim=True)
        scale = rms(y)[..., None].clamp_min(MIN_RANGE)
        packed = book.nearest(y / scale).masked_fill(broken, 0)
        scale = normal(fitted_scale(y, book.look_up(packed), scale, gain), dtype).to(dtype)
        params = scale.masked_fill(broken, math.nan).flatten(1).contiguous()
        return torch.cat([packed.flatten(1), params.view(torch.uint8)], dim=1)
    if layout.coding != AFFINE:
        codes, scale = quantize_symmetric(clip(y, clip_ratio), layout.group_size, dtype, layout.bits)
        levels = dequantize_symmetric(codes, torch.ones_like(scale), layout.bits)
        params = normal(fitted_scale(y.float(), levels, scale, gain), dtype).to(dtype).flatten(1).contiguous()
        return torch.cat([pack(codes, layout.bits).flatten(1), params.view(torch.uint8)], dim=1)
    codes, scale, zero = quantize(clip(y, clip_ratio), layout.group_size, layout.scale_dtype, layout.levels)
    if gain:
        scale, zero = fitted_parameters(y, codes, scale, gain)
    params = torch.stack([scale, zero], dim=-1).flatten(1).contiguous()
    return torch.cat([pack(codes, layout.bits).flatten(1), params.view(torch.uint8)], dim=1)


def decode_rows(rows: torch.Tensor, layout: RowLayout, codebook: Codebook | None = None) -> torch.Tensor:
    """Inverse of :func:`encode_rows` up to quantization.

    Args:
        rows: uint8 [tokens, row_bytes].
        layout: row geometry.
        codebook: of rows with that coding.

    Returns:
        float32 [tokens, kv_heads, head_dim].

    Raises:
        ValueError: the rows need a codebook that is not given.
    """
    tokens = rows.shape[0]
    if layout.exact:
        return rows.contiguous().view(layout.exact_dtype).view(tokens, layout.kv_heads, layout.head_dim).float()
    packed = rows[:, : layout.params_offset].reshape(tokens, layout.kv_heads, layout.code_bytes)
    params = rows[:, layout.params_offset :].contiguous().view(layout.scale_dtype)
    params = params.view(tokens, layout.kv_heads, layout.groups, layout.group_params)
    if layout.coding == CODEBOOK:
        return params[..., 0].float() * _given(codebook).look_up(packed)
    if layout.coding != AFFINE:
        return dequantize_symmetric(unpack(packed, layout.bits), params[..., 0], layout.bits)
    return dequantize(unpack(packed, layout.bits), params[..., 0], params[..., 1])


def _given(codebook: Codebook | None) -> Codebook:
    if codebook is None:
        raise ValueError("rows of a codebook need it: the cache and the format must have one")
    return codebook
