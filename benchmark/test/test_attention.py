"""One forward with two kinds of keys per query equals the server's cache, token by token."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, DynamicCache

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation")]

from accuracy.attention import (  # noqa: E402
    CacheView,
    Schedule,
    composed_attention,
    prefill_then_decode,
    reading,
    sliding_window,
)
from accuracy.methods.base import RowMethod, Transforms  # noqa: E402
from accuracy.session import Session  # noqa: E402
from oscar_kernels import reference  # noqa: E402
from oscar_kernels.cache import BatchTables, Chunks, LayerCache, StoreSlots, Windows, split_positions  # noqa: E402
from oscar_kernels.format import LayerFormat, SideFormat  # noqa: E402
from oscar_kernels.layout import RowLayout  # noqa: E402
from oscar_kernels.transform import SideTransform  # noqa: E402
from support.models import VOCABULARY, build  # noqa: E402

D, HEADS, LAYERS, PAGE = 64, 2, 3, 16


class Rows(RowMethod):
    """Two-bit rows behind transforms that are not orthogonal, with centers."""

    name, source, group = "rows", "test", 32
    sink, recent = 16, 24

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def transforms(center: bool) -> Transforms:
            basis = torch.linalg.qr(torch.randn(LAYERS, D, D, generator=generator).double())[0]
            forward = basis * torch.linspace(0.5, 2, D).double()
            mean = torch.randn(LAYERS, HEADS, D, generator=generator) if center else None
            return Transforms(forward.float(), torch.linalg.inv(forward).float(), mean)

        self.key, self.value = transforms(True), transforms(False)


class ServerCache:
    """The server's own cache and reference attention for one request, as a transformers attention function."""

    def __init__(self, method: Rows, length: int) -> None:
        windows = Windows(method.sink, method.recent, method.recent)
        layout, pages = RowLayout(HEADS, D, method.group), -(-length // PAGE) + 1
        self.method, self.windows, self.cached, self.ring_start = method, windows, 0, 0
        self.pages = torch.arange(1, pages, dtype=torch.int32)[None]
        self.layers = []
        for _ in range(LAYERS):
            rows = [torch.zeros(pages * PAGE, layout.row_bytes, dtype=torch.uint8) for _ in range(2)]
            sinks = [torch.zeros(2, windows.sink, HEADS, D) for _ in range(2)]
            rings = [torch.zeros(2, windows.ring, HEADS, D) for _ in range(2)]
            self.layers.append(LayerCache(layout, layout, windows, *rows, *sinks, *rings))

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        layer, count = module.layer_idx, q.shape[2]
        cache, method = self.layers[layer], self.method
        # transformers hands over all keys; those of earlier tokens are in the cache.
        q, k, v = (x[0, :, -count:].transpose(0, 1) for x in (q, k, v))
        decoded = count == 1
        positions = torch.arange(self.cached, self.cached + count)
        ring, sink = self.windows.ring, self.windows.sink
        slots = StoreSlots(
            PAGE + positions,
            torch.where(positions >= self.cached + count - ring, ring + positions % ring, -1),
            torch.where(positions < sink, sink + positions, -1),
        )
        one = torch.ones(1, dtype=torch.int32)
        kv_lens = torch.tensor([self.cached + decoded], dtype=torch.int32)
        tables = BatchTables(PAGE, self.pages, kv_lens, one, one * self.ring_start, one)
        key, value = method.key, method.value
        center = key.center[layer] if key.center is not None else torch.zeros(HEADS, D)
        dual = key.back[layer].mT
        stored = LayerFormat(
            HEADS,
            D,
            SideFormat(
                method.group,
                transform=SideTransform(
                    key.forward[layer], dual, center @ key.forward[layer], method.k_clip, method.k_gain
                ),
            ),
            SideFormat(
                method.group,
                transform=SideTransform(value.forward[layer], clip=method.v_clip, gain=method.v_gain),
            ),
        )
        if decoded:
            reference.store(cache, slots, k, v, stored)
            out = reference.decode(cache, tables, q, dual, D**-0.5)
        else:
            rotated = v @ value.forward[layer]
            chunks = Chunks.of(q, k - center, rotated, [count])
            out = reference.extend(cache, tables, chunks, dual, D**-0.5)
            reference.store(cache, slots, k, v, stored)
        if layer == LAYERS - 1:
            self.cached += count
        return (out @ value.back[layer])[None].to(q.dtype), None


LIVES = [(90, 0, 0), (90, 32, 0), (90, 0, 48), (20, 0, 0), (90, 16, 32)]


@pytest.mark.parametrize(("prompt", "chunk", "prefix"), LIVES)
@torch.no_grad()
def test_equals_the_server_step_by_step(prompt: int, chunk: int, prefix: int) -> None:
    """Logits of every token from real rows, rings and sink stores, one chunk and one decoded token at a time."""
    model, method, length = build("qwen3").float().eval(), Rows(), 110
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(2))
    schedule = prefill_then_decode(length, prompt, chunk, prefix)
    session = Session(model, ids, schedule)
    got = session.run(method.view(schedule)).logits[0]
    server = ServerCache(method, length)
    AttentionInterface.register("server_cache", server.attend)
    model.set_attn_implementation("server_cache")
    starts = sorted({0, *schedule.chunk_starts.tolist()})
    expected, past = [], DynamicCache()
    for begin, end in zip(starts, [*starts[1:], length], strict=True):
        server.ring_start = prefix if begin >= prefix else 0
        expected.append(model(ids[:, begin:end], past_key_values=past, use_cache=True).logits[0])
    wanted = torch.cat(expected)[session.first :]
    # Products of one vector and of many are summed in different orders on some processors, and a code on a rounding
    # boundary then falls either way: logits of the tokens that read it move a little. A wrong row moves all of them.
    distance = (got - wanted).abs()
    assert float((distance > 2e-3).float().mean()) < 0.1
    assert float(distance.max()) < 0.2
    exact = session.run(CacheView()).logits[0]
    assert (exact - wanted).abs().max() > 0.1


def test_a_beginning_that_sequences_share_is_computed_once() -> None:
    """As each of them alone; and only what is asked for is told."""
    model, method = build("qwen3").float().eval(), Rows()
    ids = torch.randint(VOCABULARY, (3, 100), generator=torch.Generator().manual_seed(4))
    ids[1, :80] = ids[0, :80]
    schedule = prefill_then_decode(100, 90, prefix=64)
    together = Session(model, ids, schedule)
    assert len(together.prefix[0][0]) == 2
    view = method.view(schedule)
    quantized = 0

    def keys(layer: int, k: torch.Tensor) -> torch.Tensor:
        nonlocal quantized
        quantized += k.shape[0] * k.shape[2]
        return method.keys(layer, k)

    logits = together.run(replace(view, keys=keys)).logits
    assert quantized == LAYERS * (2 * 64 + 3 * 36), "what two of them share is quantized once, too"
    for row in range(3):
        torch.testing.assert_close(logits[row], Session(model, ids[row : row + 1], schedule).run(view).logits[0])
    told = Session(model, ids, schedule, told=95).run(view).logits
    torch.testing.assert_close(told, logits[:, 95 - together.first :])


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 64), st.integers(0, 200), st.integers(0, 40))
@settings(max_examples=150)
def test_windows_are_the_servers(length: int, prompt: int, chunk: int, prefix: int, recent: int) -> None:
    """For every query, the positions read exactly are those of split_positions, and the query's own chunk."""
    prompt = min(prompt, length)
    prefix = min(prefix, prompt)
    schedule = prefill_then_decode(length, prompt, chunk, prefix)
    begin = sliding_window(schedule, recent)
    windows = Windows(0, recent, recent)
    for i in range(length):
        start = int(schedule.chunk_starts[i])
        cached = i + 1 if i >= prompt else start
        ring_start = prefix if i >= prefix else 0
        _, ring_begin = split_positions(cached, min(ring_start, cached), windows)
        assert int(begin[i]) == ring_begin


def test_schedules_are_checked() -> None:
    with pytest.raises(ValueError, match="prefix 5 <= prompt 4"):
        prefill_then_decode(10, 4, prefix=5)
    with pytest.raises(ValueError, match="chunk -1"):
        prefill_then_decode(10, 4, chunk=-1)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values may have windows of their own; small blocks give what one block gives."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 50, 16, generator=generator) for heads in (4, 2, 2))
    view = CacheView(
        lambda _, x: x.float() + 1,
        lambda _, x: x.float() * 2,
        4,
        torch.arange(50) - 5,
        (torch.arange(50) - 9).clamp_min(0),
    )
    whole = composed_attention(0, q, k, v, 0.25, view)
    monkeypatch.setattr("accuracy.attention.BLOCK_SCORES", 4000)
    torch.testing.assert_close(composed_attention(0, q, k, v, 0.25, view), whole)
    tail = composed_attention(0, q[:, :, 30:], k, v, 0.25, view)
    torch.testing.assert_close(tail, whole[:, :, 30:])
    i, head = 40, 3
    keys = torch.where(((torch.arange(41) < 4) | (torch.arange(41) >= 35))[:, None], k[1, 1, :41], k[1, 1, :41] + 1)
    values = torch.where(((torch.arange(41) < 4) | (torch.arange(41) >= 31))[:, None], v[1, 1, :41], v[1, 1, :41] * 2)
    by_hand = ((q[1, head, i] @ keys.T) * 0.25).softmax(-1) @ values
    torch.testing.assert_close(whole[1, head, i], by_hand)


@torch.no_grad()
def test_session_runs_no_exact_token_twice() -> None:
    """The kept beginning is exactly what finds nothing cached before it; the attention of the model is put back."""
    model = build("qwen3").float().eval()
    before = model.config._attn_implementation
    ids = torch.randint(VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(4))
    for schedule, first in (
        (prefill_then_decode(60, 50), 50),
        (prefill_then_decode(60, 50, prefix=32), 32),
        (prefill_then_decode(60, 50, chunk=20), 20),
        (Schedule(torch.arange(60), 0), 0),
    ):
        session = Session(model, ids, schedule)
        assert session.first == first
        with reading(model, CacheView()):
            whole = model(ids).logits
        torch.testing.assert_close(session.run(CacheView()).logits, whole[:, first:], atol=1e-3, rtol=1e-3)
    assert model.config._attn_implementation == before
