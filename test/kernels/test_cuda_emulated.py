"""The CUDA kernels run thread by thread on the CPU: every row format, against float64 and against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from kernel_cases import (
    Shape,
    assert_as_good_as,
    assert_lse,
    decode_exact,
    empty_cache,
    filled_batch,
    multiplied,
    random_rotation,
    random_slots,
    random_transform,
    random_vectors,
)
from store_cases import assert_correctly_rounded, assert_fitted, exact, split_rows

from oscar_kernels import reference
from oscar_kernels.cache import Windows
from oscar_kernels.cuda.decode import arrange_reading, decode, make_workspace
from oscar_kernels.cuda.store import arrange, store
from oscar_kernels.cuda.variant import MAX_BATCH
from oscar_kernels.layout import CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.transform import SideTransform
from support.cuda_emulator import COMPILER, emulated

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels themselves"),
]
WINDOWS = Windows(16, 24, 32)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")

SHAPES = [
    Shape(kv_heads=2, gqa=4, head_dim=128, group=128, windows=WINDOWS, page_size=32),
    Shape(kv_heads=2, gqa=4, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3),
    Shape(kv_heads=2, gqa=5, head_dim=128, group=32, windows=WINDOWS, page_size=64, k_bits=4, v_group=128),
    Shape(kv_heads=3, gqa=2, head_dim=64, group=64, windows=WINDOWS, page_size=32, k_bits=3, v_bits=3, dtype=FP16),
    Shape(kv_heads=1, gqa=8, head_dim=64, group=32, windows=WINDOWS, page_size=32, k_bits=4, v_bits=4),
    Shape(
        kv_heads=1, gqa=1, head_dim=256, group=64, windows=WINDOWS, page_size=32, k_bits=3, v_bits=4, scale_dtype=FP32
    ),
    # More columns of queries than registers: they lie in shared memory.
    Shape(kv_heads=2, gqa=12, head_dim=256, group=128, windows=WINDOWS, page_size=32),
    Shape(kv_heads=1, gqa=16, head_dim=256, group=64, windows=WINDOWS, page_size=32, k_bits=3, v_bits=4, dtype=FP16),
    Shape(
        kv_heads=1, gqa=6, head_dim=128, group=64, windows=Windows(0, 0, 0), page_size=32, v_bits=3, scale_dtype=FP16
    ),
]
CODED = replace(SHAPES[0], k_coding=CODEBOOK, v_coding=SYMMETRIC)
"""See ``test_cuda_codings.py``."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: Shape) -> None:
    """Requests from nothing to several blocks' worth; rows that must not be read are NaN."""
    batch = filled_batch(shape, [1, 39, 0, 40, 170, 330], CPU)
    q = random_vectors((6, shape.q_heads, shape.head_dim), shape.dtype, 99, CPU)
    sm_scale = 0.4 * shape.head_dim**-0.5
    lse = torch.full(q.shape[:2], float("nan"))
    with emulated():
        out = decode(batch.cache, batch.tables, q, sm_scale, lse=lse)
    assert_lse(lse, batch, q, sm_scale)
    exact = decode_exact(batch, q, sm_scale, torch.float64)
    assert_as_good_as(out, exact, decode_exact(batch, q, sm_scale, shape.dtype))


@pytest.mark.parametrize(
    ("shape", "per_head", "multiprocessors"),
    [
        (SHAPES[0], True, 3),
        (SHAPES[2], False, 12),  # ten warps for sixteen tiles of columns
        (SHAPES[3], True, 3),
        (SHAPES[5], True, 3),  # a matrix that does not fit registers
    ],
    ids=str,
)
def test_outputs_are_multiplied(shape: Shape, per_head: bool, multiprocessors: int) -> None:
    """By the matrix of their kv head. A block has tiles of vectors, or few of many partial results, or none."""
    lengths = [1, 39, 0, 40, 170] if multiprocessors == 3 else [330]
    batch = filled_batch(shape, lengths, CPU)
    q = random_vectors((len(lengths), shape.q_heads, shape.head_dim), shape.dtype, 99, CPU)
    sm_scale = 0.4 * shape.head_dim**-0.5
    matrix = random_transform(shape.head_dim, 3, shape.kv_heads if per_head else None)[1]
    reading = arrange_reading(split_matrix(matrix, shape.dtype))
    lse = torch.full(q.shape[:2], float("nan"))
    runs = []
    with emulated(multiprocessors):
        workspace = make_workspace(batch.cache, shape.q_heads, len(lengths))
        for _ in range(2):
            workspace[MAX_BATCH:] = float("nan")
            runs.append(decode(batch.cache, batch.tables, q, sm_scale, None, workspace, lse, reading))
            assert not workspace[:MAX_BATCH].view(torch.int32).any()
    assert torch.equal(*runs)
    assert_lse(lse, batch, q, sm_scale)
    wide, plain = (decode_exact(batch, q, sm_scale, dtype) for dtype in (torch.float64, shape.dtype))
    assert_as_good_as(runs[0], multiplied(wide, matrix), multiplied(plain, matrix))


@pytest.mark.parametrize("shape", [SHAPES[1], CODED], ids=str)
def test_a_request_does_not_depend_on_its_company(shape: Shape) -> None:
    """Alone it is cut into other pieces, which may move its last bits and nothing else."""
    batch = filled_batch(shape, [330, 170, 40, 60], CPU)
    q = random_vectors((4, shape.q_heads, shape.head_dim), shape.dtype, 99, CPU)
    names = ("page_table", "kv_lens", "ring_row", "ring_start", "sink_block")
    first = replace(batch.tables, **{name: getattr(batch.tables, name)[:1] for name in names})
    with emulated():
        together, alone = decode(batch.cache, batch.tables, q, 0.05), decode(batch.cache, first, q[:1], 0.05)
    assert float((together[:1] - alone).double().norm() / alone.double().norm()) < 4e-3


@pytest.mark.parametrize(
    ("shape", "gain"), [(SHAPES[0], 0.0), *((shape, 0.98) for shape in SHAPES if shape.gqa != 12)], ids=str
)
def test_store(shape: Shape, gain: float) -> None:
    """Rotated keys and values with a center: bytes are those of the reference but where rounding decides.

    The shape that is left out differs from another in what decode makes of its query heads.
    """
    tokens, heads = 21, shape.q_heads + 2 * shape.kv_heads
    slots = random_slots(tokens, shape.windows, 2 * shape.page_size, 5, CPU)
    fused = random_vectors((tokens, heads, shape.head_dim), shape.dtype, 1, CPU)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    rk = random_rotation(shape.head_dim, 2, CPU)
    rv = random_transform(shape.head_dim, 3, shape.kv_heads)[0]
    center = torch.randn(shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(4))
    caches = [empty_cache(shape, 2, 5, CPU, fill=7.0) for _ in range(3)]
    layers = [
        shape.format(SideTransform(rk, None, center, 0.96, gain=of), SideTransform(rv, clip=0.92, gain=of))
        for of in (gain, 0.0)
    ]
    with emulated():
        q_rot = store(caches[0], slots, k, v, arrange(prepare(layers[0], shape.dtype)), q, shape.page_size)
        store(caches[2], slots, k, v, arrange(prepare(layers[1], shape.dtype)), q, shape.page_size)
    reference.store(caches[1], slots, k, v, layers[0])
    for x, matrix, offset, clip, name in ((k, rk, center, 0.96, "k"), (v, rv, None, 0.92, "v")):
        layout, plain = shape.layout_of(name), exact(x, matrix)
        rows, wanted, without = (getattr(cache, f"{name}_rows")[slots.row] for cache in caches)
        y = plain if offset is None else plain - offset.double()
        length = torch.maximum(plain.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True))
        assert_correctly_rounded(without, y, layout, clip, length)
        if gain and offset is None:
            assert_fitted(rows, without, y, layout, gain)
        codes, wanted_codes = (split_rows(of, layout)[0] for of in (rows, wanted))
        assert (codes != wanted_codes).double().mean() < 5e-3
        for window in ("ring", "sink"):
            got, want = (getattr(cache, f"{name}_{window}").float() for cache in caches[:2])
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-4)
    wide = exact(q, rk)
    rounding = 2.0 ** (-8 if shape.dtype == BF16 else -11)
    assert ((q_rot.double() - wide).abs() <= rounding * wide.abs() + 1e-5 * wide.norm(dim=-1, keepdim=True)).all()


@pytest.mark.parametrize(
    ("shape", "per_head"), [*product((SHAPES[1], SHAPES[3], SHAPES[5]), (False, True)), (CODED, False)], ids=str
)
def test_store_is_the_same_on_any_gpu(shape: Shape, per_head: bool) -> None:
    """A block takes as many tiles as there are too many for the multiprocessors: all of them, some, or one."""
    tokens, heads = 37, shape.q_heads + 2 * shape.kv_heads
    slots = random_slots(tokens, shape.windows, 2 * shape.page_size, 5, CPU)
    fused = random_vectors((tokens, heads, shape.head_dim), shape.dtype, 1, CPU)
    q, k, v = fused.split([shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    sets = shape.kv_heads if per_head else None
    key, value = (SideTransform(*random_transform(shape.head_dim, seed, sets), clip=0.96) for seed in (2, 3))
    layer = arrange(prepare(shape.format(key, value), shape.dtype))
    found = []
    for multiprocessors in (1, 4, 4096):
        cache = empty_cache(shape, 2, 5, CPU, fill=7.0)
        with emulated(multiprocessors):
            rotated = store(cache, slots, k, v, layer, q, shape.page_size)
        found.append([rotated, *(getattr(cache, f"{of}_{part}") for of in "kv" for part in ("rows", "ring", "sink"))])
    for others in found[1:]:
        assert all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for one, other in zip(found[0], others, strict=True)
        )


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """High bits read from where the next head's are: the emulation tells."""
    import support.cuda_emulator as emulator

    shape = SHAPES[1]
    batch = filled_batch(shape, [170], CPU)
    q = random_vectors((1, shape.q_heads, shape.head_dim), shape.dtype, 99, CPU)
    build = emulator.build.__wrapped__

    def broken(*arguments: object) -> object:
        text = emulator.Path.read_text

        def read(path: object) -> str:
            return text(path).replace("key_high = KeyRows::WIDTH +", "key_high = KeyRows::WIDTH + 4 +")  # type: ignore[arg-type]

        monkeypatch.setattr(emulator.Path, "read_text", read)
        try:
            return build(*arguments)
        finally:
            monkeypatch.setattr(emulator.Path, "read_text", text)

    monkeypatch.setattr(emulator, "build", broken)
    with emulated():
        out = decode(batch.cache, batch.tables, q, 0.2)
    wanted = decode_exact(batch, q, 0.2, torch.float64)
    with pytest.raises(AssertionError):
        assert_as_good_as(out, wanted, decode_exact(batch, q, 0.2, shape.dtype))
