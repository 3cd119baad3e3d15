"""What is stored in rows and windows, and how it is judged: for the tests of every store kernel."""

from __future__ import annotations

import torch
from kernel_cases import (
    OF_EVERY_WIDTH,
    Shape,
    empty_cache,
    random_rotation,
    random_slots,
    random_vectors,
)

from oscar_kernels import reference
from oscar_kernels.cache import LayerCache, StoreSlots, Windows
from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import STRETCH, clip_index, unpack
from oscar_kernels.layout import AFFINE, CODEBOOK, RowLayout
from oscar_kernels.prepared import prepare
from oscar_kernels.scales import STEP
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store

# Float32 rounding of a sum of head_dim products, relative to the length of the vector.
ROUNDING = 4e-6
MANTISSA = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}

SHAPES = [
    Shape(),
    Shape(head_dim=128, group=128, kv_heads=3, gqa=1),
    Shape(head_dim=128, group=32, gqa=5, dtype=torch.float16, scale_dtype=torch.float16),
    Shape(head_dim=256, group=32, kv_heads=1, scale_dtype=torch.float32),
    Shape(head_dim=256, group=128, kv_heads=1, dtype=torch.float16),
    Shape(windows=Windows(0, 0, 0)),
    Shape(windows=Windows(16, 0, 0), scale_dtype=torch.float16),
    Shape(windows=Windows(0, 24, 32)),
    *OF_EVERY_WIDTH,
]


def split_rows(rows: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [tokens, heads, groups, group], scale and zero point [tokens, heads, groups], as float64.

    Codes of a codebook are indices, its zero points 0; symmetric codes have theirs in the middle of their levels.
    """
    codes = rows[:, : layout.params_offset].reshape(len(rows), layout.kv_heads, -1)
    codes = codes if layout.coding == CODEBOOK else unpack(codes, layout.bits)
    params = rows[:, layout.params_offset :].contiguous().view(layout.scale_dtype)
    params = params.view(len(rows), layout.kv_heads, layout.groups, layout.group_params).double()
    middle = 0 * params[..., 0] + (0 if layout.coding == CODEBOOK else (layout.levels - 1) / 2)
    zero = params[..., 1] if layout.coding == AFFINE else middle
    return codes.unflatten(-1, (layout.groups, -1)).double(), params[..., 0], zero


def assert_correctly_rounded(
    rows: torch.Tensor, y: torch.Tensor, layout: RowLayout, clip: float, length: torch.Tensor | None = None,
    book: Codebook | None = None,
) -> None:  # fmt: skip
    """Every stored number is the rounding of its float64 value, up to the float32 rounding of the rotation.

    Each number is judged given the stored numbers before it (scale, then zero point, then codes), so a scale that
    falls to the other side of a rounding boundary does not count against the codes that follow from it. ``length``
    [tokens, heads, 1] is the length of what was rotated, where that is not ``y``. Points of a codebook are as near as
    the nearest.
    """
    index = clip_index(layout.head_dim, clip)
    slack = ROUNDING * (y.norm(dim=-1, keepdim=True) if length is None else length)
    half_ulp = 2.0 ** -MANTISSA[layout.scale_dtype]
    if book is not None:
        _, scale, _ = split_rows(rows, layout)
        wanted = y.square().mean(-1, keepdim=True).sqrt()
        assert ((scale - wanted).abs() <= half_ulp * wanted * 1.001 + slack).all()
        x = (y / wanted).unflatten(-1, (-1, 1, 4))
        distance = (x - book.values.double()).norm(dim=-1)
        indices = rows[:, : layout.params_offset].view(len(rows), layout.kv_heads, -1, 1).long()
        own, least = distance.gather(-1, indices)[..., 0], distance.amin(-1)
        # What moves a vector by so much moves its distance from any point by that at most.
        assert (own - least <= 4 * slack / wanted + 1e-5).all()
        return
    if index is not None:
        tau = y.abs().sort(dim=-1).values[..., index : index + 1]
        y = y.clamp(-tau, tau)
    grouped = y.unflatten(-1, (-1, layout.group_size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    codes, scale, zero = split_rows(rows, layout)
    wanted = (high - low).clamp_min(1e-8) / (layout.levels - 1)
    if layout.scale_dtype == torch.float16:
        wanted = torch.maximum(wanted, torch.maximum(low.abs(), high.abs()) / 32768).clamp_min(2.0**-14)
    if layout.coding != AFFINE:
        wanted = STEP[layout.bits] * grouped.square().mean(-1).sqrt()
        low = -zero * scale
    assert ((scale - wanted).abs() <= half_ulp * wanted * 1.001 + slack).all()
    # float16 zero points below 2^-14 are subnormal: an absolute rounding of 2^-25.
    assert ((zero + low / scale).abs() <= half_ulp * (low / scale).abs() * 1.001 + 2.0**-25 + slack / scale).all()
    level = (grouped / scale[..., None] + zero[..., None]).clamp(0, layout.levels - 1)
    slack = (slack / scale)[..., None] + 1e-6 * (1 + zero.abs()[..., None])
    assert ((codes - level).abs() <= 0.5 + slack).all()


def assert_next_to_reference(
    cache: LayerCache, reference_cache: LayerCache, name: str, layout: RowLayout, slots: StoreSlots
) -> None:
    """Codes of a side are next to all those of the reference, windows as near as roundings, other rows as they were."""
    rows = getattr(cache, f"{name}_rows")
    wanted = getattr(reference_cache, f"{name}_rows").to(rows.device)
    codes = slice(0, layout.params_offset)
    assert (rows[:, codes] != wanted[:, codes]).double().mean() < 2e-3
    untouched = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    untouched[slots.row] = False
    assert (rows[untouched] == 0).all()
    for window in ("ring", "sink"):
        got, want = (getattr(of, f"{name}_{window}").to(rows.device).float() for of in (cache, reference_cache))
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-4)
        assert (got != want).double().mean() < 2e-3 if got.numel() else True


def assert_narrowed(rotated: torch.Tensor, wide: torch.Tensor, dtype: torch.dtype) -> None:
    """Rotated queries are the roundings of what they are in float64."""
    rounding = 2.0 ** -MANTISSA[dtype]
    assert ((rotated.double() - wide).abs() <= rounding * wide.abs() + 1e-5 * wide.norm(dim=-1, keepdim=True)).all()


def assert_fitted(
    rows: torch.Tensor, plain: torch.Tensor, y: torch.Tensor, layout: RowLayout, gain: float,
    book: Codebook | None = None,
) -> None:  # fmt: skip
    """Scale and zero point follow from the stored codes and the vectors in float64, up to float32 rounding of sums.

    ``plain`` are the rows without a gain: they have the same codes and bound the scales.
    """
    slack = 2 * ROUNDING * y.norm(dim=-1, keepdim=True)
    codes, scale, zero = split_rows(rows, layout)
    plain_codes, plain_scale, _ = split_rows(plain, layout)
    assert torch.equal(codes, plain_codes)
    grouped = y.unflatten(-1, (layout.groups, -1))
    mean, mean_code = grouped.mean(-1), codes.mean(-1)
    if layout.coding != AFFINE:
        mean, mean_code = 0 * mean, zero
    if book is not None:
        codes, mean_code = book.look_up(codes.flatten(-2).byte()).double().unsqueeze(-2), 0 * mean
        plain_scale = y.square().mean(-1, keepdim=True).sqrt()  # before it was rounded
    rest, levels = grouped - mean[..., None], codes - mean_code[..., None]
    along = (rest * levels).sum(-1)
    wanted = gain * rest.square().sum(-1) / along
    # What a change of y by the slack in every channel does to the quotient.
    moved = slack * (2 * gain * rest.abs().sum(-1) + wanted * levels.abs().sum(-1)) / along
    half_ulp = 2.0 ** -MANTISSA[layout.scale_dtype]
    assert (along > 0).all()
    wanted = wanted.clamp(plain_scale / STRETCH, plain_scale * STRETCH)
    assert ((scale - wanted).abs() <= half_ulp * wanted * 1.001 + moved).all()
    if layout.coding != AFFINE:
        return
    wanted = mean_code - mean / scale
    assert ((zero - wanted).abs() <= half_ulp * wanted.abs() * 1.001 + 2.0**-25 + 1e-6 + slack / scale).all()


def run_both(shape: Shape, tokens: int, clip: float, device: torch.device, rotate_v: bool, rotate_k: bool = True,
             gain: float = 0.0):  # fmt: skip
    """Store the same vectors with the kernel and with the reference."""
    pages, requests = -(-tokens // shape.page_size) + 2, max(2, tokens // 8)
    slots = random_slots(tokens, shape.windows, pages * shape.page_size, requests, device)
    sizes = (shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    # Slices of one projection, as a model hands them over.
    fused = torch.cat([
        random_vectors((tokens, *size), shape.dtype, 1 + number, device).flatten(1) for number, size in enumerate(sizes)
    ], 1)  # fmt: skip
    apart = fused.split([heads * channels for heads, channels in sizes], dim=1)
    q, k, v = (x.unflatten(1, size) for x, size in zip(apart, sizes, strict=True))
    rk = random_rotation(shape.head_dim, 2, device) if rotate_k else None
    rv = random_rotation(shape.value_dim, 3, device) if rotate_v else None
    caches = [empty_cache(shape, pages, requests, device, fill=7.0) for _ in range(2)]
    layer = shape.format(*(SideTransform(matrix, clip=clip, gain=gain) for matrix in (rk, rv))).to(device)
    q_rot = store(caches[0], slots, k, v, prepare(layer, shape.dtype), q=q)
    reference.store(caches[1], slots, k, v, layer)
    return caches, slots, (q, k, v), (rk, rv), q_rot


def exact(x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, heads, head_dim] times a matrix or one per kv head, float64."""
    if rotation is None or rotation.dim() == 2:
        return x.double() if rotation is None else x.double() @ rotation.double()
    gqa = x.shape[1] // len(rotation)
    return torch.stack([x[:, head].double() @ rotation[head // gqa].double() for head in range(x.shape[1])], dim=1)
