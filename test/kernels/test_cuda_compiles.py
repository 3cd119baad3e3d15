"""The CUDA kernels of models that are served, by the compiler that is installed: they compile, and where they should
need no memory for registers they take none. Needs no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import Shape
from machine_code import disassemble, stray_descriptors
from test_cuda_store import case_of
from test_cuda_variants import variant

from oscar_kernels.cache import Windows
from oscar_kernels.cuda import jit, pair
from oscar_kernels.cuda.decode import READING_TERMS
from oscar_kernels.cuda.store import defines
from oscar_kernels.layout import CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import prepare
from support.spills import assembler_log, spilled_bytes

WINDOWS = Windows(64, 256, 256)
WIDTHS = [(2, 2), (3, 2), (3, 3), (4, 4)]


def slow(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Not among the core tests: a compilation each."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def shape_of(gqa: int, head_dim: int, bits: tuple[int, int]) -> Shape:
    return Shape(8, gqa, head_dim, min(head_dim, 128), windows=WINDOWS, page_size=64, k_bits=bits[0], v_bits=bits[1])


@pytest.mark.parametrize(
    ("gqa", "head_dim", "bits"),
    [
        (4, 128, WIDTHS[0]),
        *slow((4, 128, bits) for bits in WIDTHS[1:]),
        *slow((4, 64, bits) for bits in WIDTHS[::2]),
        *slow((4, 256, bits) for bits in WIDTHS[1::2]),
        *slow([(1, 128, (3, 4)), (8, 64, (4, 3))]),
    ],
    ids=str,
)
def test_decode_spills_nothing(gqa: int, head_dim: int, bits: tuple[int, int]) -> None:
    assert spilled_bytes("decode.cu", dict(variant(shape_of(gqa, head_dim, bits)).defines())) == 0


@pytest.mark.parametrize(
    ("gqa", "head_dim", "bits"), [(4, 128, (2, 2)), (4, 128, (3, 2)), (4, 64, (2, 2)), (1, 128, (3, 4))]
)
def test_multiplying_outputs_spills_nothing(gqa: int, head_dim: int, bits: tuple[int, int]) -> None:
    """Columns of the matrix are in registers while partial results are merged."""
    found = replace(variant(shape_of(gqa, head_dim, bits)), reading_terms=READING_TERMS, reading_sets=8)
    assert spilled_bytes("decode.cu", dict(found.defines())) == 0


@pytest.mark.parametrize(
    ("gqa", "kv_heads", "bits", "drafts"), [(4, 4, (2, 2), 0), *slow([(6, 1, (4, 2), 0), (4, 4, (4, 2), 4)])], ids=str
)
def test_two_parts_spill_next_to_nothing(gqa: int, kv_heads: int, bits: tuple[int, int], drafts: int) -> None:
    """More than each does alone, beside keys of 3 bits; shared memory beside theirs is what is set aside for it."""
    windows = Windows(64, 256, 256 + drafts)
    first, second = (
        replace(
            variant(replace(shape_of(gqa, 128, own), kv_heads=kv_heads, windows=windows)),
            reading_terms=READING_TERMS, reading_sets=kv_heads, drafts=drafts, queries=max(drafts, 1),
        )
        for own in ((3, 2), bits)
    )  # fmt: skip
    alone = [spilled_bytes("decode.cu", dict(one.defines())) for one in (first, second)]
    text = pair.source(first, second)
    assert spilled_bytes(pair.SOURCE, {}, text) <= sum(alone) + 16
    (static,) = re.findall(r"(\d+) bytes smem", assembler_log(pair.SOURCE, {}, text))
    assert int(static) <= pair.STATIC_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coding", "kv_heads", "k_bits", "shared"),
    [(SYMMETRIC, 8, 3, False), (CODEBOOK, 4, 2, False), (CODEBOOK, 8, 2, True)],
)
def test_rows_without_zero_points_spill_nothing(coding: str, kv_heads: int, k_bits: int, shared: bool) -> None:
    shape = replace(shape_of(4, 128, (k_bits, 2)), kv_heads=kv_heads, k_coding=coding, v_coding=SYMMETRIC)
    found = replace(variant(shape), reading_terms=READING_TERMS, reading_sets=kv_heads, shared_book=shared)
    assert spilled_bytes("decode.cu", dict(found.defines())) == 0
    assert spilled_bytes("store.cu", dict(defines(found, prepare(case_of(shape, "both"), shape.dtype)))) == 0


@pytest.mark.parametrize(
    ("head_dim", "bits", "kind"),
    [
        (128, WIDTHS[0], "both"),
        *slow((128, bits, "both") for bits in WIDTHS[1:]),
        *slow((64, (4, 2), kind) for kind in ("keys", "both", "both per head")),
        *slow([(128, (2, 2), "keys"), (128, (3, 3), "both per head")]),
    ],
    ids=str,
)
def test_store_spills_nothing(head_dim: int, bits: tuple[int, int], kind: str) -> None:
    shape = shape_of(4, head_dim, bits)
    layer = prepare(case_of(shape, kind), shape.dtype)
    assert spilled_bytes("store.cu", dict(defines(variant(shape), layer))) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("gqa", "kv_heads", "most"), [(8, 4, 32), (12, 2, 320), (16, 1, 1100), (16, 4, 1100)])
def test_wide_queries_spill_little(gqa: int, kv_heads: int, most: int) -> None:
    """Hybrid models' heads. Sums of 16 heads of 256 channels are 128 registers of 240."""
    heads = replace(shape_of(gqa, 256, (2, 2)), kv_heads=kv_heads)
    assert spilled_bytes("decode.cu", dict(variant(heads).defines())) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gqa", "bits"), [*product((4,), WIDTHS), *product((12,), WIDTHS[::2]), *product((16,), WIDTHS[1::2])], ids=str
)
def test_sixteen_columns_spill_next_to_nothing(gqa: int, bits: tuple[int, int]) -> None:
    """Four tokens of 4 query heads in verification, and many heads in decoding: the next keys fit beside the sums."""
    tokens = 4 if gqa == 4 else 1
    windows = Windows(64, 256, 256 + tokens)
    found = variant(replace(shape_of(gqa, 128, bits), windows=windows))
    found = replace(found, drafts=tokens, queries=tokens) if tokens > 1 else found
    assert spilled_bytes("decode.cu", dict(found.defines())) <= 16


@pytest.mark.parametrize(
    ("bits", "sets", "most"),
    [(WIDTHS[1], 1, 300), *slow([(WIDTHS[0], 2, 300), (WIDTHS[1], 0, 1300), (WIDTHS[0], 0, 1000)])],
    ids=str,
)
def test_products_of_four_warps_spill_nothing_in_their_loop(
    bits: tuple[int, int], sets: int, most: int, tmp_path: Path
) -> None:
    """And little where a request begins and ends."""
    shape = replace(shape_of(8, 256, bits), kv_heads=2, windows=Windows(64, 256, 260))
    found = replace(variant(shape), drafts=4, queries=4, warpgroups=True)
    if sets:
        found = replace(found, reading_terms=READING_TERMS, reading_sets=sets)
    assert spilled_bytes("verify.cu", dict(found.defines())) <= most
    (tmp_path / "cubin").write_bytes(jit.compile_source("verify.cu", dict(found.defines())))
    text = disassemble(tmp_path / "cubin")
    assert stray_descriptors(text) == []
    lines = text.splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    assert len(products) == 3 * 16  # keys of the first stage, of the next one, and values
    loop = lines[products[16] : products[-1]]
    assert not [line for line in loop if "LDL" in line or "STL" in line]


def test_what_is_spilled_is_counted() -> None:
    """Eight query heads to a kv head of 128 channels need a few more registers than there are."""
    assert 0 < spilled_bytes("decode.cu", dict(variant(shape_of(8, 128, (2, 2))).defines())) < 512
