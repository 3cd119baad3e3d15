"""One launch for both parts of a layer: bit for bit what a launch for each does with as many blocks.

On a Hopper GPU, or on a CPU thread by thread.

That those are right is said by ``test_cuda_decode.py``, ``test_cuda_verify.py`` and, of layers, ``test_parts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    Shape,
    filled_batch,
    random_transform,
    random_trees,
    random_vectors,
    with_new_tokens,
)
from test_cuda_variants import variant

from oscar_kernels.cache import Windows
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.cuda import pair
from oscar_kernels.cuda.launch import processors
from oscar_kernels.cuda.variant import MAX_BATCH, SHARED_LIMIT
from oscar_kernels.layout import CODEBOOK, SYMMETRIC
from oscar_kernels.parts import Part
from oscar_kernels.prepared import split_matrix
from oscar_kernels.visible import words_of
from sglang_oscar.attention.decode_choice import CudaDecode
from support.cuda_emulator import emulated
from support.hopper import DEVICE, HOPPER, MARKS

pytestmark = MARKS
WINDOWS = Windows(16, 24, 32)
QWEN3 = Shape(kv_heads=4, gqa=4, head_dim=128, group=128, windows=Windows(64, 256, 256), page_size=64)
K3 = Shape(kv_heads=1, gqa=6, head_dim=128, group=128, windows=WINDOWS, page_size=32, k_bits=3)
PAIRS = [
    (K3, replace(K3, k_bits=2)),
    (K3, replace(K3, k_bits=4)),
    (replace(K3, kv_heads=2, gqa=2), replace(K3, kv_heads=4, gqa=2, k_coding=SYMMETRIC, v_bits=4)),
    (replace(K3, gqa=2), replace(K3, kv_heads=2, gqa=2, k_bits=2, k_coding=CODEBOOK, v_coding=SYMMETRIC)),
    (replace(K3, gqa=12, head_dim=256), replace(K3, gqa=12, head_dim=256, k_bits=2)),
]
ONE_EACH, UNEQUAL = replace(K3, kv_heads=3, gqa=1), replace(K3, kv_heads=5, gqa=1, k_bits=2)
ALL = processors(0) if HOPPER else 7
"""Multiprocessors of the GPU, or of the emulated one."""
LENGTHS = [[0], [5], [330], [1, 39, 0, 40, 170, 330], [0, 0, 0]]
LONG = [[100_000], [64, 65, 319, 320, 321, 5000, 0, 20_000], [3000] * 33] if HOPPER else []


@contextmanager
def of(blocks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches for one cache have so many blocks."""
    if not HOPPER:
        with emulated(blocks):
            yield
        return
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "processors", lambda device: blocks)
        yield


def parts_of(
    shapes: tuple[Shape, Shape], lengths: list[int], drafts: int, sums: bool, multiplied: bool
) -> tuple[list[Part], list[object]]:
    """Parts over the same pages, and the batch's tables and words of new tokens."""
    made, seen = [], words_of(random_trees(len(lengths), drafts)).to(DEVICE) if drafts else None
    for number, shape in enumerate(shapes):
        batch = filled_batch(shape, lengths, DEVICE)
        if drafts:
            batch = with_new_tokens(batch, drafts)
        tokens = len(lengths) * max(drafts, 1)
        q = random_vectors((tokens, shape.q_heads, shape.head_dim), shape.dtype, 90 + number, DEVICE)
        lse = torch.empty(tokens, shape.q_heads, device=DEVICE) if sums else None
        matrix = random_transform(shape.head_dim, 3 + number, shape.kv_heads)[1].to(DEVICE)
        reading = cuda.arrange_reading(split_matrix(matrix, shape.dtype)) if multiplied else None
        made.append(Part(batch.cache, q, lse, reading))
    return made, [batch.tables, seen]


def spoil(parts: list[Part], workspaces: list[torch.Tensor]) -> None:
    for part, workspace in zip(parts, workspaces, strict=True):
        workspace[MAX_BATCH:] = float("nan")
        if part.lse is not None:
            part.lse.fill_(float("nan"))


def results(parts: list[Part], out: torch.Tensor, workspaces: list[torch.Tensor]) -> list[torch.Tensor]:
    assert not any(workspace[:MAX_BATCH].view(torch.int32).any() for workspace in workspaces)
    return [out.clone(), *(part.lse.clone() for part in parts if part.lse is not None)]


def check(
    shapes: tuple[Shape, Shape], lengths: list[int], monkeypatch: pytest.MonkeyPatch, drafts: int = 0,
    sums: bool = False, multiplied: bool = True,
) -> None:  # fmt: skip
    parts, (tables, seen) = parts_of(shapes, lengths, drafts, sums, multiplied)
    with of(ALL, monkeypatch):
        workspaces = [cuda.make_workspace(part.cache, part.q_rot.shape[1], len(lengths), drafts) for part in parts]
        page = shapes[0].page_size
        variants = [
            cuda.variant_of(part.cache, page, part.q_rot.shape[1], part.q_rot.dtype, sums, drafts, part.reading)
            for part in parts
        ]
        split = pair.first_blocks(*variants, ALL)
        runs = []
        for _ in range(2):
            spoil(parts, workspaces)
            out = pair.attend(tuple(parts), tables, seen, 0.04, tuple(workspaces))
            runs.append(results(parts, out, workspaces))
    spoil(parts, workspaces)
    alone = []
    for part, workspace, blocks in zip(parts, workspaces, (split, ALL - (split or 0)), strict=True):
        with of(blocks or ALL, monkeypatch):
            rest = {"workspace": workspace, "lse": part.lse, "reading": part.reading}
            if seen is None:
                alone.append(cuda.decode(part.cache, tables, part.q_rot, 0.04, **rest))
            else:
                alone.append(cuda.verify(part.cache, tables, seen, part.q_rot, 0.04, **rest))
    wanted = results(parts, torch.cat(alone, 1), workspaces)
    for found in runs:
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert found[0].isfinite().all()
    assert (split is None) == (shapes[0] is ONE_EACH)


@pytest.mark.parametrize("lengths", [*LENGTHS, *LONG], ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
@pytest.mark.parametrize("shapes", PAIRS[:2], ids=str)
def test_requests_of_any_length(
    shapes: tuple[Shape, Shape], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None with work, fewer stages than blocks, and several blocks' worth; outputs are multiplied."""
    check(shapes, lengths, monkeypatch)


@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("shapes", [*PAIRS, (ONE_EACH, UNEQUAL)], ids=str)
def test_log_sum_exps(shapes: tuple[Shape, Shape], multiplied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any codes and numbers of heads; parts whose blocks have no one size take two launches, into one output."""
    check(shapes, [1, 39, 0, 40, 170, 330], monkeypatch, sums=True, multiplied=multiplied)


@pytest.mark.parametrize("shapes", [PAIRS[0], PAIRS[3], (ONE_EACH, UNEQUAL)], ids=str)
def test_verification(shapes: tuple[Shape, Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes."""
    check(shapes, [40, 1, 17, 170, 330], monkeypatch, drafts=4)
    check(shapes, [40, 1], monkeypatch, drafts=4, sums=True)


def test_what_else_is_launched_leaves_the_counters_of_second_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not cut writes partial results; then parts are decoded in the same workspace."""
    lengths = [330, 40]
    parts, (tables, _) = parts_of(PAIRS[0], lengths, 0, False, True)
    whole = filled_batch(replace(K3, kv_heads=2), lengths, DEVICE)
    q = torch.cat([part.q_rot for part in parts], 1)
    with of(ALL, monkeypatch):
        workspaces = tuple(cuda.make_workspace(part.cache, part.q_rot.shape[1], 2) for part in parts)
        wanted = pair.attend(tuple(parts), tables, None, 0.04, workspaces)
        workspace = torch.zeros(2 * cuda.workspace_numel(whole.cache, q.shape[1], 2), device=DEVICE)
        decode = CudaDecode(workspace, halved=True)
        for _ in range(2):
            decode(whole.cache, whole.tables, q, 0.04)
            assert torch.equal(decode.attend(parts, tables, None, 0.04), wanted)
    for half in workspace.chunk(2):
        assert not half[:MAX_BATCH].view(torch.int32).any()


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 4])
def test_graph_replay_follows_the_tables(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of layers overlap in a captured graph, which serves every length."""
    shapes = (replace(QWEN3, k_bits=3), replace(QWEN3, k_bits=bits))
    parts, (tables, seen) = parts_of(shapes, [5000, 3, 700, 0], 0, False, True)
    workspaces = tuple(cuda.make_workspace(part.cache, part.q_rot.shape[1], 4) for part in parts)
    wanted = pair.attend(tuple(parts), tables, seen, 0.04, workspaces)
    lengths = tables.kv_lens.clone()
    tables.kv_lens.fill_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [pair.attend(tuple(parts), tables, seen, 0.04, workspaces) for _ in range(3)]
    tables.kv_lens.copy_(lengths)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)
    results(parts, wanted, list(workspaces))


@pytest.mark.parametrize("blocks", [132, 114, 78])
def test_shares(blocks: int) -> None:
    """Between equal ones and those of bytes; no part is without blocks for each of its matrices."""
    first, second = (variant(replace(QWEN3, k_bits=bits)) for bits in (3, 2))
    own = pair.first_blocks(first, second, blocks)
    assert own is not None
    assert blocks / 2 < own < blocks * 5 / 9
    assert pair.first_blocks(second, first, blocks) == blocks - own
    few = replace(first, reading_sets=4)
    assert pair.first_blocks(few, few, 8) == 4
    assert pair.first_blocks(few, few, 7) is None
    assert pair.first_blocks(first, first, 1) is None


def test_products_of_four_warps_take_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each part does alone."""
    shapes = tuple(
        replace(QWEN3, kv_heads=2, gqa=8, head_dim=256, k_bits=bits, windows=Windows(16, 24, 32)) for bits in (3, 2)
    )
    parts, (tables, seen) = parts_of(shapes, [170, 40], 4, True, True)
    with of(ALL, monkeypatch):
        workspaces = tuple(cuda.make_workspace(part.cache, part.q_rot.shape[1], 2, 4) for part in parts)
        variants = [cuda.variant_of(part.cache, 64, 16, part.q_rot.dtype, drafts=4) for part in parts]
        assert [one.source for one in variants] == ["verify.cu"] * 2
        assert pair.first_blocks(*variants, ALL) is None
        out = pair.attend(tuple(parts), tables, seen, 0.04, workspaces)
        alone = [
            cuda.verify(part.cache, tables, seen, part.q_rot, 0.04, reading=part.reading, lse=part.lse)
            for part in parts
        ]
    assert torch.equal(out, torch.cat(alone, 1))


def test_blocks_of_two_sizes_take_two_launches() -> None:
    three, five = (variant(replace(QWEN3, kv_heads=heads)) for heads in (3, 5))
    assert three.threads != five.threads
    assert pair.first_blocks(three, five, 132) is None
    large = variant(replace(QWEN3, kv_heads=8, head_dim=256, gqa=2, k_bits=4, v_bits=4))
    fits = large.shared_bytes + pair.STATIC_BYTES <= SHARED_LIMIT
    assert (pair.first_blocks(large, large, 132) is not None) == fits
