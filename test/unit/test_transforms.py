"""Transforms that are not orthogonal, and centered keys: the server's kernels compute the same attention with them."""

from __future__ import annotations

import pytest
import torch

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, LayerCache, StoreSlots, Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import RowLayout
from oscar_kernels.transform import SideTransform
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.memory.layer import CachedLayer

D, HEADS, GQA, PAGE, SLOTS = 64, 2, 3, 16, 96
SCALE = D**-0.5


def matrix(seed: int) -> torch.Tensor:
    """Well-conditioned and not orthogonal: float32 [D, D]."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(D, D, generator=generator).double())
    return (q * torch.linspace(0.5, 2.0, D).double()).float()


def inverse_transpose(transform: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(transform.double()).mT.float()


def vectors(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, D, generator=torch.Generator().manual_seed(seed)) + 0.7


def lossless_cache(monkeypatch: pytest.MonkeyPatch, recent: int) -> LayerCache:
    """Float32 rows and windows, so nothing but the algebra is left."""
    monkeypatch.setattr(RowLayout, "code_bytes", property(lambda self: 4 * self.head_dim))
    monkeypatch.setattr(RowLayout, "param_bytes", property(lambda self: 0))
    monkeypatch.setattr(reference, "encode_rows", lambda y, *_: y.contiguous().view(len(y), -1).view(torch.uint8))
    monkeypatch.setattr(
        reference, "decode_rows", lambda rows, *_: rows.contiguous().view(torch.float32).view(-1, HEADS, D)
    )
    layout = RowLayout(HEADS, D, D)
    rows = [torch.zeros(SLOTS, layout.row_bytes, dtype=torch.uint8) for _ in range(2)]
    side = [torch.zeros(2, size, HEADS, D) for size in (8, 8, recent, recent)]
    return LayerCache(layout, layout, Windows(8, recent, recent), *rows, *side)


def batch(kv_len: int, first: int, count: int, recent: int, chunk: bool) -> Batch:
    """One request on pages 1, 2, ...; tokens first .. first + count - 1 are new."""
    positions = torch.arange(first, first + count)
    ring = torch.where(positions >= first + count - recent, recent + positions % recent, -1)
    slots = StoreSlots(PAGE + positions, ring, torch.where(positions < 8, 8 + positions, -1))
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    pages = torch.arange(1, 6, dtype=torch.int32)[None]
    tables = BatchTables(PAGE, pages, torch.tensor([kv_len], dtype=torch.int32), one, none, one)
    return Batch(tables=tables, slots=slots, extend_lens=[count] if chunk else None, chunk_starts=None)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_attention_is_the_same(monkeypatch: pytest.MonkeyPatch, centered: bool, per_head: bool) -> None:
    """Two chunks and three decoded tokens through sink, history and ring against plain attention."""
    recent, lens = 12, [40, 13, 1, 1, 1]
    t_k, t_v = matrix(1), matrix(2)
    if per_head:
        t_k, t_v = torch.stack([t_k, matrix(11)]), torch.stack([t_v, matrix(12)])
    mean = 3 * torch.randn(HEADS, D, generator=torch.Generator().manual_seed(3))
    center = torch.einsum("hd,hde->he", mean, t_k.expand(HEADS, D, D)) if centered else None
    key = SideTransform(t_k, inverse_transpose(t_k), center)
    value = SideTransform(t_v, inverse_transpose(t_v))
    sides = (SideFormat(D, transform=side) for side in (key, value))
    layer = CachedLayer(lossless_cache(monkeypatch, recent), LayerFormat(HEADS, D, *sides))
    total = sum(lens)
    q, k, v = vectors(4, total, HEADS * GQA), vectors(5, total, HEADS), vectors(6, total, HEADS)
    if centered:
        torch.testing.assert_close(key.plain_center, mean, atol=1e-4, rtol=1e-4)
    kernels, out, first = TorchKernels(), [], 0
    for count in lens:
        span = slice(first, first + count)
        chunk = count > 1
        step = batch(first if chunk else first + 1, first, count, recent, chunk)
        attend = kernels.extend if chunk else kernels.decode
        out.append(attend(layer, step, Call(q[span], k[span], v[span], step.slots.row, 0, SCALE)))
        first += count
    got = torch.cat(out).double()
    heads = [x.double().repeat_interleave(GQA, 1).transpose(0, 1) for x in (k, v)]
    queries = q.double().transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, *heads, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got, expected.transpose(0, 1), atol=2e-4, rtol=2e-4)
