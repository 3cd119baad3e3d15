"""The Hopper decode kernel against float64 attention over the same codes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
from kernel_cases import (
    Batch,
    Shape,
    assert_as_good_as,
    assert_lse,
    decode_exact,
    filled_batch,
    multiplied,
    poison,
    random_rotation,
    random_transform,
    random_vectors,
    with_padding,
)

from oscar_kernels import reference
from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.cuda.decode import arrange_reading, decode, make_workspace
from oscar_kernels.cuda.store import arrange, store
from oscar_kernels.cuda.variant import MAX_BATCH
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store as triton_store
from support.hopper import HOPPER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = Windows(64, 256, 256)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

# Every head_dim with every group and every ratio of query to kv heads; the other choices alternate.
MATRIX = [
    Shape(kv_heads, gqa, head_dim, group, scale, dtype, WINDOWS, page_size=64)
    for (head_dim, groups) in ((64, (32, 64)), (128, (32, 64, 128)), (256, (32, 64, 256)))
    for index, (group, gqa) in enumerate(product(groups, (1, 2, 4, 5, 8, 16)))
    for kv_heads, scale, dtype in [
        ((8, 1, 2, 4, 3, 512 // head_dim)[index % 6], (BF16, FP16, FP32)[index // 2 % 3], (BF16, FP16)[index % 2])
    ]
]
SHAPES = [
    Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(0, 0, 0), page_size=64),
    Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(16, 0, 8), page_size=32),
    Shape(kv_heads=2, head_dim=128, group=64, windows=Windows(0, 24, 32), page_size=128),
    Shape(kv_heads=16, gqa=1, head_dim=128, group=128, windows=WINDOWS, page_size=64),
    Shape(kv_heads=9, gqa=3, head_dim=64, group=64, windows=WINDOWS, page_size=64),
    Shape(kv_heads=5, gqa=7, head_dim=128, group=128, windows=Windows(32, 100, 128), page_size=32),
]
# Keys and values of every width, with every head_dim, in integer and in float sums.
WIDTHS = [
    Shape(kv_heads, gqa, head_dim, group, scale, BF16, WINDOWS, 64, k_bits, v_bits)
    for index, (k_bits, v_bits, head_dim) in enumerate(product((2, 3, 4), (2, 3, 4), (64, 128, 256)))
    for kv_heads, gqa, group, scale in [((8, 2, 3)[index % 3], (4, 8, 1)[index // 3 % 3], (64, 32)[index % 2], BF16)]
    if (k_bits, v_bits) != (2, 2)
]
QWEN3 = [replace(SHAPES[0], windows=WINDOWS, k_bits=bits) for bits in (3, 4)]
# Without zero points, and keys of codebooks: as many kv heads as fit, and one, whose rows are no whole words.
CODINGS = [
    *(replace(of, k_coding=SYMMETRIC, v_coding=SYMMETRIC) for of in (*WIDTHS[::4], *QWEN3, *SHAPES[4:])),
    *(
        Shape(kv_heads, gqa, head_dim, min(head_dim, 128), BF16, BF16, WINDOWS, 64, k_coding=CODEBOOK, v_coding=coding)
        for kv_heads, gqa, head_dim, coding in (
            *((4, gqa, 128, SYMMETRIC) for gqa in (1, 2, 4, 7, 16)),
            (1, 5, 128, SYMMETRIC),
            (2, 6, 128, AFFINE),
            (8, 4, 64, SYMMETRIC),
            (2, 12, 256, SYMMETRIC),
        )
    ),
]


def check(
    shape: Shape, kv_lens: list[int], ring_starts: list[int] | None = None, matrix: torch.Tensor | None = None
) -> Batch:
    """Poisoned output and workspace, two runs that agree bit for bit, error at most twice that of 16-bit torch.

    ``matrix``: what outputs are multiplied by, on the CPU.
    """
    device, seed = torch.device("cuda"), int.from_bytes(os.urandom(3), "big")
    print(f"seed of {shape}: {seed}")
    batch = filled_batch(shape, kv_lens, device, ring_starts, seed=seed)
    q = random_vectors((len(kv_lens), shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    sm_scale = 0.4 * shape.head_dim**-0.5
    workspace = make_workspace(batch.cache, shape.q_heads, len(kv_lens))
    matrix = None if matrix is None else matrix.to(device)
    reading = arrange_reading(split_matrix(matrix, shape.dtype))
    runs = []
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        workspace[MAX_BATCH:] = float("nan")
        runs.append(decode(batch.cache, batch.tables, q, sm_scale, out, workspace, reading=reading))
        assert not workspace[:MAX_BATCH].view(torch.int32).any()
    assert torch.equal(*runs)
    exact, plain = (decode_exact(batch, q, sm_scale, dtype) for dtype in (torch.float64, shape.dtype))
    if matrix is not None:
        exact, plain = multiplied(exact, matrix), multiplied(plain, matrix)
    assert_as_good_as(runs[0], exact, plain)
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    again = decode(batch.cache, batch.tables, q, sm_scale, workspace=workspace, lse=lse, reading=reading)
    assert torch.equal(again, runs[0])
    assert_lse(lse, batch, q, sm_scale)
    return batch


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", MATRIX + SHAPES + WIDTHS + QWEN3 + CODINGS, ids=str)
def test_ragged_lengths(shape: Shape) -> None:
    """One token, fewer than the windows, borders of tiles and pages, several splits, and an empty request."""
    check(shape, [1, 64, 65, 0, 319, 320, 321, 385, 2000, 700])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", MATRIX[::5] + SHAPES[::2] + WIDTHS[::6] + QWEN3 + CODINGS[::3], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_outputs_are_multiplied(shape: Shape, per_head: bool) -> None:
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads if per_head else None)[1]
    check(shape, [1, 64, 65, 0, 319, 320, 321, 385, 2000, 700], matrix=matrix)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kv_lens", [[0], [1], [100_000], [8191] * 3, [2048, 1, 700] * 33, [600] * 1024], ids=str)
def test_outputs_are_multiplied_at_size(kv_lens: list[int]) -> None:
    """A head a block, with all of its partial results, up to many tiles of requests."""
    shape = QWEN3[0]
    check(shape, kv_lens, matrix=random_transform(shape.head_dim, 3, shape.kv_heads)[1])


@pytest.mark.gpu
@needs_hopper
def test_a_nan_is_multiplied_in_its_head_only() -> None:
    shape = Shape(kv_heads=8, head_dim=128, group=64, windows=WINDOWS, page_size=64)
    batch = filled_batch(shape, [5000, 700], torch.device("cuda"))
    q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, torch.device("cuda"))
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads)[1].cuda()
    reading = arrange_reading(split_matrix(matrix, shape.dtype))
    clean = decode(batch.cache, batch.tables, q, 0.05, reading=reading)
    poison(batch, "v_rows", request=0, position=3000)
    out = decode(batch.cache, batch.tables, q, 0.05, reading=reading)
    assert out[0, -shape.gqa :].isnan().all()
    out[0, -shape.gqa :] = clean[0, -shape.gqa :]
    assert torch.equal(out, clean)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("gqa", [1, 4, 8])
@pytest.mark.parametrize("kv_lens", [[100_000], [1, 64, 320, 321, 9000, 2, 40_000, 8191] * 4, [2048] * 256])
@pytest.mark.parametrize("k_bits", [2, 3, 4])
def test_at_size(gqa: int, kv_lens: list[int], k_bits: int) -> None:
    check(Shape(gqa=gqa, kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64, k_bits=k_bits), kv_lens)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("ring_starts", [[1200, 1150, 1], [1100, 1199, 1180]])
def test_ring_holds_only_what_this_request_wrote(ring_starts: list[int]) -> None:
    check(Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64), [1200] * 3, ring_starts)


@pytest.mark.gpu
@needs_hopper
def test_values_of_any_magnitude() -> None:
    """Value scales far outside float16, logits beyond exp's range."""
    shape = Shape(kv_heads=8, head_dim=128, group=64, scale_dtype=FP32, windows=Windows(0, 0, 0), page_size=64)
    device = torch.device("cuda")
    for factor in (1e-9, 1e7):
        batch = filled_batch(shape, [2000, 70], device)
        params = batch.cache.v_rows[:, shape.value_layout.params_offset :].contiguous().view(FP32)
        params = params.view(-1, shape.kv_heads, shape.value_layout.groups, 2)
        params[..., 0] *= factor
        batch.cache.v_rows[:, shape.value_layout.params_offset :] = params.flatten(1).view(torch.uint8)
        q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, device) * 20
        out = decode(batch.cache, batch.tables, q, 1.0)
        exact = decode_exact(batch, q, 1.0, torch.float64)
        assert_as_good_as(out.double() / factor, exact / factor, decode_exact(batch, q, 1.0, shape.dtype) / factor)


@pytest.mark.gpu
@needs_hopper
def test_long_tail_beside_a_peak() -> None:
    """One token with half of the weight, tens of thousands that share the other half."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=Windows(0, 0, 0), page_size=64)
    device, length = torch.device("cuda"), 60_000
    batch = filled_batch(shape, [length], device)
    q = random_vectors((1, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    # A key along the query: its logit is log(length) above the others', whose spread is small.
    params = batch.cache.k_rows[:, shape.key_layout.params_offset :].contiguous().view(BF16)
    params = params.view(-1, shape.kv_heads, 1, 2)
    params[..., 0] *= 0.05
    slot = int(batch.tables.page_table[0, 500]) * 64
    params[slot, ..., 0] *= 60
    batch.cache.k_rows[:, shape.key_layout.params_offset :] = params.flatten(1).view(torch.uint8)
    out = decode(batch.cache, batch.tables, q, shape.head_dim**-0.5)
    exact = decode_exact(batch, q, shape.head_dim**-0.5, torch.float64)
    assert_as_good_as(out, exact, decode_exact(batch, q, shape.head_dim**-0.5, shape.dtype))


COPIES = 264
"""Requests that leave each of the 132 blocks of an H100 or H200 two whole ones; on more multiprocessors one or two."""


@lru_cache(maxsize=1)
def long_request(length: int, k_bits: int = 2, v_bits: int = 2) -> Batch:
    """One request, all of it history. What is cached does not depend on the number of query heads."""
    shape = Shape(8, 4, 128, 128, BF16, BF16, Windows(0, 0, 0), 64, k_bits, v_bits)
    return filled_batch(shape, [length], torch.device("cuda"))


def alone_and_in_company(batch: Batch, q: torch.Tensor, sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A request spread over all blocks, and the same one COPIES times: then a block has all of its positions.

    Args:
        q: [1, q_heads, head_dim].

    Returns:
        the request's output alone, and the worst of the copies' (by distance per head), [q_heads, head_dim] float64.
    """
    wide = {name: x.expand(COPIES, *x.shape[1:]).contiguous()
            for name, x in vars(batch.tables).items() if isinstance(x, torch.Tensor)}  # fmt: skip
    alone = decode(batch.cache, batch.tables, q, sm_scale)[0].double()
    many = decode(batch.cache, replace(batch.tables, **wide), q.expand(COPIES, -1, -1).contiguous(), sm_scale).double()
    worst = (many - alone).norm(dim=-1).argmax(0)
    return alone, many[worst, torch.arange(many.shape[1], device=many.device)]


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance of a head's output, relative to its length."""
    return float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("length", "k_bits", "v_bits"),
    [(length, 2, 2) for length in (16_384, 65_536, 131_072, 262_144)]
    + [(262_144, *bits) for bits in product((2, 3, 4), (2, 3, 4)) if bits != (2, 2)],
)
def test_a_request_does_not_depend_on_its_company(length: int, k_bits: int, v_bits: int) -> None:
    """Whether one block has few positions of a request or all of them: rounding, at every length and every spread.

    Both ways to sum values, and heads of different spreads side by side in a warp.
    """
    batch = long_request(length, k_bits, v_bits)
    for gqa in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        q = random_vectors((1, 8 * gqa, 128), BF16, 99, torch.device("cuda"))
        q[:, ::3] *= 0.1
        for sm_scale in (0.02, 0.05, 0.1, 0.2):
            alone, many = alone_and_in_company(batch, q, sm_scale)
            assert relative(many, alone) < 0.01, (gqa, sm_scale, relative(many, alone))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_peak_beside_a_quarter_of_a_million_tokens(place: str) -> None:
    """A token that weighs as much as all others, more, or less; before or after them, all of them in one block."""
    batch = long_request(262_144)
    keys, values = (x.double() for x in reference.gather(batch.cache, batch.tables, 0, 262_144))
    token = 7 if place == "first" else 262_144 - 7
    for gqa in (1, 4, 8):
        q = keys[token].repeat_interleave(gqa, 0)[None].to(BF16)
        for sm_scale in (0.03, 0.05, 0.07, 0.1):
            alone, many = alone_and_in_company(batch, q, sm_scale)
            logits = torch.einsum("hgd,thd->hgt", q[0].double().unflatten(0, (8, gqa)), keys) * sm_scale
            exact = torch.einsum("hgt,thd->hgd", logits.softmax(-1), values).flatten(0, 1)
            for out in (alone, many):
                assert relative(out, exact) < 0.02, (gqa, sm_scale, relative(out, exact))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("gqa", [1, 3, 4, 8])
def test_integer_sums_make_room(gqa: int) -> None:
    """Flat attention over the largest codes, 262,144 positions in a block: sums pass 2^31 unless they are halved."""
    batch = long_request(262_144)
    rows = batch.cache.v_rows.clone()
    rows[:, : batch.shape.key_layout.params_offset] = 0xFF
    full = replace(batch, cache=replace(batch.cache, v_rows=rows))
    q = torch.zeros(1, 8 * gqa, 128, dtype=BF16, device="cuda")
    q[:, 1::2] = random_vectors((1, 8 * gqa, 128), BF16, 99, torch.device("cuda"))[:, 1::2]
    alone, many = alone_and_in_company(full, q, 0.05)
    assert relative(many, alone) < 0.01
    exact = reference.gather(full.cache, full.tables, 0, 262_144)[1].double().mean(0).repeat_interleave(gqa, 0)
    for out in (alone, many):
        assert relative(out[::2], exact[::2]) < 0.01


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("side", ["k_rows", "v_rows"])
@pytest.mark.parametrize("gqa", [1, 4, 5, 16])
def test_a_nan_reaches_the_heads_that_read_it(gqa: int, side: str) -> None:
    shape = Shape(kv_heads=8, gqa=gqa, head_dim=128, group=64, windows=WINDOWS, page_size=64)
    batch = filled_batch(shape, [5000, 700], torch.device("cuda"))
    q = random_vectors((2, shape.q_heads, shape.head_dim), shape.dtype, 99, torch.device("cuda"))
    clean = decode(batch.cache, batch.tables, q, 0.05)
    poison(batch, side, request=0, position=3000)
    out = decode(batch.cache, batch.tables, q, 0.05)
    assert out[0, -gqa:].isnan().all()
    out[0, -gqa:] = clean[0, -gqa:]
    assert torch.equal(out, clean)


@pytest.mark.gpu
@needs_hopper
def test_padded_rows_are_harmless() -> None:
    """Graph padding reads the NaN-filled dummies; the live rows are as exact as without it."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64)
    device = torch.device("cuda")
    batch = filled_batch(shape, [3000, 450], device)
    q = random_vectors((4, shape.q_heads, shape.head_dim), shape.dtype, 99, device)
    padded = with_padding(batch.tables, 2)
    out = decode(batch.cache, padded, q, 0.05)
    assert out[2:].isnan().all()
    exact = decode_exact(batch, q[:2], 0.05, torch.float64)
    assert_as_good_as(out[:2], exact, decode_exact(batch, q[:2], 0.05, shape.dtype))


@pytest.mark.gpu
@needs_hopper
def test_buffers_of_the_caller() -> None:
    """Strided queries and output; a workspace that is too small."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64)
    batch = filled_batch(shape, [3000, 450], torch.device("cuda"))
    wide = random_vectors((2, 2 * shape.q_heads, shape.head_dim), shape.dtype, 99, torch.device("cuda"))
    out = torch.full_like(wide, 7.0)
    got = decode(batch.cache, batch.tables, wide[:, ::2], 0.1, out=out[:, ::2])
    assert torch.equal(got, decode(batch.cache, batch.tables, wide[:, ::2].contiguous(), 0.1))
    assert (out[:, 1::2] == 7.0).all()
    with pytest.raises(ValueError, match="workspace must hold"):
        decode(batch.cache, batch.tables, wide[:, ::2], 0.1, workspace=torch.empty(10, device="cuda"))


@pytest.mark.gpu
@needs_hopper
def test_graph_replay_follows_the_tables() -> None:
    """One captured graph serves every length, and capturing fails if anything synchronizes."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=WINDOWS, page_size=64)
    batch = check(shape, [5000, 3, 700])
    q = random_vectors((3, shape.q_heads, shape.head_dim), shape.dtype, 99, torch.device("cuda"))
    want = decode(batch.cache, batch.tables, q, 0.1)
    tables = replace(batch.tables, kv_lens=torch.ones_like(batch.tables.kv_lens))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(batch.cache, tables, q, 0.1)
    tables.kv_lens.copy_(batch.tables.kv_lens)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("windows", [WINDOWS, Windows(0, 0, 0)], ids=str)
@pytest.mark.parametrize("kv_lens", [[30_000], [5000, 1, 66, 9000] * 8], ids=["one", "many"])
@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_decode_starts_while_the_store_before_it_runs(kernel: str, windows: Windows, kv_lens: list[int]) -> None:
    """Layers of a captured step, whose launches overlap, equal the same calls with a pause between any two."""
    shape = Shape(kv_heads=8, head_dim=128, group=128, windows=windows, page_size=64)
    device, count = torch.device("cuda"), len(kv_lens)
    lens = torch.tensor(kv_lens, device=device)
    tables = filled_batch(shape, kv_lens, device).tables
    page = tables.page_table.long()[torch.arange(count, device=device), (lens - 1) // shape.page_size]
    ring = tables.ring_row.long() * windows.ring + (lens - 1) % max(windows.ring, 1)
    sink = torch.where(lens <= windows.sink, tables.sink_block.long() * windows.sink + lens - 1, -1)
    slots = StoreSlots(page * shape.page_size + (lens - 1) % shape.page_size,
                       ring if windows.ring else torch.full_like(ring, -1), sink)  # fmt: skip
    rotation = random_rotation(shape.head_dim, 7, device)
    layer = shape.format(SideTransform(rotation, clip=0.96), SideTransform(rotation, clip=0.92))
    prepared = prepare(layer, shape.dtype)
    arranged = arrange(prepared)
    heads = (count, shape.q_heads + 2 * shape.kv_heads, shape.head_dim)
    # The same seed: pages of all layers are those of ``tables``.
    layers = [(filled_batch(shape, kv_lens, device).cache, random_vectors(heads, shape.dtype, seed, device))
              for seed in range(4)]  # fmt: skip
    workspace = make_workspace(layers[0][0], shape.q_heads, count)

    def step(pause: Callable[[], None]) -> list[torch.Tensor]:
        outs = []
        for cache, x in layers:
            q, k, v = x.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
            if kernel == "cuda":
                q_rot = store(cache, slots, k, v, arranged, q, shape.page_size, decoding=True)
            else:
                q_rot = triton_store(cache, slots, k, v, prepared, q=q)
            pause()
            outs.append(decode(cache, tables, q_rot, 0.05, workspace=workspace))
            pause()
        return outs

    want = step(torch.cuda.synchronize)
    assert all(out.isfinite().all() for out in want)
    # What the store writes is poisoned again: a decode that does not wait for it reads that.
    for cache, _ in layers:
        for rows in (cache.k_rows, cache.v_rows):
            rows[slots.row] = 0xFF
        for window in (cache.k_ring, cache.v_ring):
            window.view(-1, shape.kv_heads, shape.head_dim)[slots.ring[slots.ring >= 0]] = float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(lambda: None)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for out, wanted in zip(outs, want, strict=True):
        assert torch.equal(out, wanted)
