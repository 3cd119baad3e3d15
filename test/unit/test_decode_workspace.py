"""What decode and verification take beside the cache is in the account, to the byte that is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.codebook import Codebook
from oscar_kernels.cuda.books import arranged_book, searched_points
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import CODEBOOK, RowLayout
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from sglang_oscar.attention import decode_choice
from sglang_oscar.attention.decode_workspace import DecodeWorkspace, decode_workspace, matrix_bytes, without_rows
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.plan import make_plan

BF16 = torch.bfloat16


def geometry(drafts: int) -> Geometry:
    """Qwen3-8B's."""
    return Geometry.uniform(RowLayout(8, 128, 128), Windows(64, 256, 256 + drafts, max_splits=4), BF16, layers=36)


def task(drafts: int) -> decode_choice.DecodeTask:
    kinds = without_rows(geometry(drafts), "cpu")
    return decode_choice.DecodeTask("auto", kinds, 64, 32, BF16, short_chunks=True, drafts=drafts)


def of(drafts: int, ranks: int = 1) -> DecodeWorkspace:
    return decode_workspace(task(drafts), geometry(drafts).formats, 40_960, ranks)


@pytest.mark.parametrize(("drafts", "gigabytes"), [(8, 0.19), (16, 0.36), (64, 1.37)])
def test_partial_results_of_a_verification(drafts: int, gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 requests, by the Triton kernel on a GPU of 132 multiprocessors. What is allocated is what was planned."""
    monkeypatch.setattr(decode_choice.triton, "default_pieces", lambda cache: 132 * 16 // cache.kv_heads)
    planned = of(drafts).partial_bytes(256)
    assert planned / 1e9 == pytest.approx(gigabytes, rel=0.03)
    made = decode_choice.choose(task(drafts), 256)
    assert isinstance(made, decode_choice.TritonDecode)
    assert made.workspace.nbytes == planned


def test_it_is_taken_off_the_budget() -> None:
    """Also where the number of requests follows from it, and where a budget is too small."""
    beside = of(64)
    plain, plan = (make_plan(geometry(64), 40 * GIB, 200, 64, given) for given in ([], [beside]))
    assert plan.fixed_bytes - plain.fixed_bytes == beside.fixed_bytes(200)
    assert f"decode workspace: {beside.fixed_bytes(200) / GIB:.3f} GiB" in plan.lines(1000)[-1]
    derived = [make_plan(geometry(64), 40 * GIB, None, 64, given).max_running for given in ([], [beside])]
    assert derived[1] < derived[0]
    with pytest.raises(Int2Error, match=f"the workspace of decode {beside.fixed_bytes(200) / GIB:.3f} GiB"):
        make_plan(geometry(64), plain.fixed_bytes + GIB // 2, 200, 64, [beside])


def test_ranks_fill_a_step_up() -> None:
    assert of(4, ranks=8).partial_bytes(1) == of(4).partial_bytes(8)


@pytest.mark.parametrize("sets", [None, 2])
def test_matrices(sets: int | None) -> None:
    """As files have them, and as both kernels read them."""
    shape = (64, 64) if sets is None else (sets, 64, 64)
    matrix = torch.eye(64).expand(shape).contiguous()
    key = SideTransform(matrix, matrix * 2, torch.zeros(2, 64))
    layer = LayerFormat(2, 64, SideFormat(64, transform=key), SideFormat(64, transform=SideTransform(matrix)))
    for second in (0, 1):  # points of all kv heads, and one that the second has alone
        points = torch.zeros(2, 16, 256, 4, dtype=torch.int8)
        points[1] = second
        book = Codebook(points, torch.ones(2, 16))
        size = points.nbytes + book.factor.nbytes + arranged_book(book).nbytes + searched_points(book).nbytes
        coded = replace(layer, key=replace(layer.key, coding=CODEBOOK, codebook=book))
        assert matrix_bytes({0: coded}, BF16) == matrix_bytes({0: layer}, BF16) + size
    made = prepare(layer, BF16)
    terms = sum(x.terms.nbytes for x in (made.key.matrix, made.key.reading, made.value.matrix) if x is not None)
    back = made.value.reading
    assert back is not None
    own = 4 * (4 * matrix.numel()) + 2 * 4 * 2 * 64  # with what outputs are multiplied by; centers in either basis
    assert matrix_bytes({0: layer, 7: layer}, BF16) == 2 * (own + 2 * terms + back.terms.nbytes)
