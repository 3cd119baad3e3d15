"""Rotate: vectors times the matrix of their head, on the tensor cores. Queries, values and outputs of a prompt.

A launch is a row of tiles, each of ``BLOCK`` (token, head) vectors. The matrix comes in 16-bit terms (exact products,
float32 sums), so a result has float32 accuracy. The store (:mod:`oscar_kernels.triton.store`) rotates by the same
tiles. Alone they are a kernel of few arguments, which take the host most of the time of a launch: a pass behind a
cached prefix launches it three times a layer, and if it is short it waits for the host.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.driver import driver
from triton.runtime.jit import constexpr_function

from oscar_kernels.prepared import TERMS, SplitMatrix
from oscar_kernels.triton.arith import INTERPRET, dot, narrow
from oscar_kernels.triton.padding import channel_mask, padded

MANY_VECTORS = 16384
"""(token, head) vectors above which tiles are larger."""


@constexpr_function
def roomy() -> bool:
    """Whether a block of the GPU that is compiled for has 160 KB of shared memory: 8.0 and 8.7, Hopper, data-center
    Blackwell; consumer and workstation cards have 99 KB."""
    target = current_target()
    return target is not None and (target.arch in {80, 87} or 90 <= target.arch < 120)


@triton.jit
def tile_count(tokens, HEADS: tl.constexpr, SETS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of all (token, head) vectors; none holds heads of two of the SETS matrices."""
    return tl.cdiv(tokens * (HEADS // SETS), BLOCK) * SETS


@triton.jit
def vectors_of_tile(
    x_ptr, stride_token, stride_head, tile, tokens, HEADS: tl.constexpr, SETS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row pointers, mask, token, head and number of the matrix of a tile of (token, head) vectors."""
    HEADS_OF_SET: tl.constexpr = HEADS // SETS
    count = tokens * HEADS_OF_SET
    if SETS == 1:
        of_set = tile
        matrix = 0
    else:
        # Heads with a matrix of their own: vectors in order of matrices, tiles of one matrix each.
        tiles = tl.cdiv(count, BLOCK)
        of_set = tile % tiles
        matrix = tile // tiles
    vector = of_set * BLOCK + tl.arange(0, BLOCK)
    token = (vector // HEADS_OF_SET).to(tl.int64)
    head = matrix * HEADS_OF_SET + vector % HEADS_OF_SET
    return x_ptr + token * stride_token + head * stride_head, vector < count, token, head, matrix


@triton.jit
def rotate_tile(
    x_rows, mask, r_ptr, R_SCALE: tl.constexpr, TERMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ALIKE: tl.constexpr = 1,
):  # fmt: skip
    """float32 [BLOCK, padded(D)]: the vectors times the rotation, 0 behind D channels; TERMS = 0 is identity.

    Identity is a product with the unit matrix, which is exact: so every tile leaves the tensor cores with its vectors
    spread over few threads, where what follows is cheap. ALIKE is how many branches of a kernel do the same with what
    comes out: Triton 3.8 gives each of them buffers of its own.
    """
    DEPTH: tl.constexpr = 64
    STEPS: tl.constexpr = D // DEPTH
    P: tl.constexpr = padded(D)
    channel = tl.arange(0, P)
    y = tl.zeros([BLOCK, P], tl.float32)
    if TERMS == 0:
        for step in tl.static_range(STEPS):
            row = step * DEPTH + tl.arange(0, DEPTH)
            x = tl.load(x_rows[:, None] + row[None, :], mask=mask[:, None], other=0.0)
            y = dot(x, (row[:, None] == channel[None, :]).to(tl.float32).to(x.dtype), y)
    else:
        # Small terms first. All loads of a short loop are in flight at once; of padded heads two, which are as large as
        # the shared memory of the smallest GPUs lets them be, and so are two of 256 channels there.
        FLIGHT: tl.constexpr = 4 if P == D and (D < 256 or roomy()) else 2
        for step in tl.range(0, TERMS * STEPS, num_stages=FLIGHT // ALIKE):
            row = step % STEPS * DEPTH + tl.arange(0, DEPTH)
            x = tl.load(x_rows[:, None] + row[None, :], mask=mask[:, None], other=0.0)
            term = TERMS - 1 - step // STEPS
            at = r_ptr + (term * D * D + row[:, None] * D + channel[None, :])
            if P == D:
                r = tl.load(at)
            else:
                r = tl.load(at, mask=(channel < D)[None, :], other=0.0)
            y = dot(x, r, y)
        y = y * (1.0 / R_SCALE)
    return y


@triton.jit
def write_rotated(
    x_ptr, stride_token, stride_head, out_ptr, terms_ptr, tile, tokens, HEADS: tl.constexpr, SETS: tl.constexpr,
    D: tl.constexpr, R_SCALE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of vectors, rotated, to [tokens, HEADS, D]."""
    x_rows, mask, token, head, matrix = vectors_of_tile(
        x_ptr, stride_token, stride_head, tile, tokens, HEADS, SETS, BLOCK
    )
    y = rotate_tile(x_rows, mask, terms_ptr + matrix * (TERMS * D * D), R_SCALE, TERMS, D, BLOCK)
    rows = out_ptr + (token * HEADS + head) * D
    at = rows[:, None] + tl.arange(0, padded(D))[None, :]
    tl.store(at, narrow(y, out_ptr.dtype.element_ty), mask=channel_mask(mask, D))


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(
    x_ptr, stride_token, stride_head, out_ptr, terms_ptr, tokens, HEADS: tl.constexpr, SETS: tl.constexpr,
    D: tl.constexpr, R_SCALE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles)."""
    tile = tl.program_id(0)
    write_rotated(
        x_ptr, stride_token, stride_head, out_ptr, terms_ptr, tile, tokens, HEADS, SETS, D, R_SCALE, TERMS, BLOCK
    )


def rotate(x: torch.Tensor, matrix: SplitMatrix) -> torch.Tensor:
    """Multiply vectors by a matrix; with one per kv head, ``heads / kv_heads`` consecutive heads share one.

    Args:
        x: [tokens, heads, head_dim], bfloat16 or float16. Any stride between tokens and between heads.
        matrix: from :func:`oscar_kernels.prepared.split_matrix`, for vectors of this dtype.

    Returns:
        the same, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_vectors("vectors", x, None, matrix.terms.shape[-1], x.dtype)
    tokens, heads, head_dim = x.shape
    matrix.check(heads, x.dtype, arranged=False)
    out, sets = x.new_empty(x.shape), matrix.sets
    block, warps = tile_shape(tokens * heads, head_dim)
    if tokens:
        _rotate_kernel[(host_tile_count(tokens, heads, sets, block),)](
            x, x.stride(0), x.stride(1), out, matrix.terms, tokens, HEADS=heads, SETS=sets, D=head_dim,
            R_SCALE=matrix.scale, TERMS=matrix.count, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def host_tile_count(tokens: int, heads: int, sets: int, block: int) -> int:
    """As :func:`tile_count`."""
    return sets * -(-tokens * (heads // sets) // block)


@cache
def _has_tensor_memory() -> bool:
    """Whether the GPU is a Blackwell one, whose products of 64 rows go through tensor memory."""
    return not INTERPRET and int(driver.active.get_current_target().arch) // 10 in (10, 11)


def tile_shape(vectors: int, head_dim: int) -> tuple[int, int]:
    """(vectors per tile, warps): small tiles spread a decode step over the GPU, large ones read R less often."""
    if _has_tensor_memory():
        # Triton 3.6 cannot lay out what is done here with products that come from there.
        return 32, 4 if head_dim <= 128 else 8
    if head_dim > 128:
        return 64, 8
    return (64, 4) if vectors <= MANY_VECTORS else (128, 8)


def check_vectors(name: str, x: torch.Tensor, heads: int | None, head_dim: int, dtype: torch.dtype) -> None:
    """Refuse vectors that no kernel can read.

    Args:
        name: for messages.
        x: [tokens, heads, head_dim], any stride between tokens and between heads.
        heads: how many there must be; None for any number.
        head_dim, dtype: what they must have.

    Raises:
        ValueError: they have not.
    """
    if x.dim() != 3 or x.shape[2] != head_dim or x.stride(2) != 1 or heads not in (None, x.shape[1]):
        wanted = "heads" if heads is None else heads
        raise ValueError(
            f"{name} must be [tokens, {wanted}, {head_dim}] with contiguous channels, got {tuple(x.shape)}"
        )
    if x.dtype != dtype or dtype not in TERMS:
        raise ValueError(f"keys, values and queries must all be bfloat16 or all float16, got {name} of {x.dtype}")
