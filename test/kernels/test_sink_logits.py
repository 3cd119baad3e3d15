"""Sink logits at every exit of attention, with centered keys and without, against float64.

Exits are a chunk without a prefix, one behind a prefix, a chunk of one token, decode and verification; of the torch
reference, of the Triton kernels, and of the ragged extend with its passes, short chunks, chunks read in place and
single tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import Shape, empty_cache, random_transform, random_vectors
from test_ragged_extend import TorchRagged

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, StoreSlots, Windows
from oscar_kernels.extend_plan import Limits
from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.sink_logits import scale_by_sinks
from oscar_kernels.sliding_window import attend
from oscar_kernels.tables import window_slots
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.sink_logits import scale_by_sinks_
from oscar_kernels.visible import causal_words
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.decode_choice import TritonDecode
from sglang_oscar.attention.gpu import GpuKernels
from sglang_oscar.attention.kernels import Kernels
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.attention.prompt_store import PromptStore
from sglang_oscar.memory.layer import CachedLayer

SHAPE = Shape(dtype=torch.float16, windows=Windows(sink=16, recent=24, ring=32))
CPU = torch.device("cpu")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton runs; the reference stays on the CPU."""
SM_SCALE = 0.1
TOLERANCE = 0.02
NEW = 4
"""Tokens of a request that are verified."""
PAGES = 8
"""Pages of a request; request i has pages i * PAGES + 1 and on, ring row i + 1 and sink block i + 1."""
WAYS = ["reference", "triton", "passes", "short", "in place", "joined"]
LIMITS = {
    "passes": Limits(capacity=50, passes=8, break_even=0, window=0),
    "short": Limits(capacity=50, passes=8, break_even=64, window=0),
    "in place": Limits(capacity=1, passes=1, break_even=0, window=0),
    "joined": Limits(capacity=300, passes=8, break_even=0, window=0, joined=True),
}


def layer_of(centered: bool, device: torch.device = CPU) -> CachedLayer:
    """A layer with transforms for every kv head; a center shifts the logits of a query by far more than a sink."""
    generator = torch.Generator().manual_seed(6)
    center = 3 * torch.randn(SHAPE.kv_heads, SHAPE.head_dim, generator=generator).to(device) if centered else None
    matrices = [[x.to(device) for x in random_transform(SHAPE.head_dim, seed, SHAPE.kv_heads)] for seed in (4, 5)]
    key = SideTransform(*matrices[0], center, 0.96, 0.98)
    value = SideTransform(*matrices[1], clip=0.92, gain=1.0)
    return CachedLayer(empty_cache(SHAPE, 3 * PAGES + 1, 3, device, fill=float("nan")), SHAPE.format(key, value))


def kernels_of(way: str, layer: CachedLayer) -> Kernels:
    """The reference, or what a GPU runs, on the interpreter."""
    if way == "reference":
        return TorchKernels()
    made: Any = GpuKernels.__new__(GpuKernels)
    made._prepared = {id(layer): prepare(layer.format, SHAPE.dtype)}
    made._decode, made._arranged, made._ragged = TritonDecode(torch.empty(1 << 25, device=HERE)), {}, None
    made._prompts = PromptStore(made._prepared, SHAPE.page_size)
    if way != "triton":
        planner = RaggedPlanner(SHAPE.format(), SHAPE.q_heads, SHAPE.dtype, LIMITS[way], HERE, TorchRagged)
        made._ragged = RaggedExtend(planner, decode)
    return made


def batch_of(prefixes: list[int], lengths: list[int], device: torch.device) -> Batch:
    """The tables of a chunk per request, as the backend builds them."""
    count, windows = len(lengths), SHAPE.windows
    own = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    pages = torch.arange(count * PAGES, dtype=torch.int32, device=device).view(count, PAGES) + 1
    before = torch.tensor(prefixes, dtype=torch.int32, device=device)
    tables = BatchTables(SHAPE.page_size, pages, before, own, torch.zeros_like(own), own)
    request = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths)).to(device)
    spans = [torch.arange(begin, begin + size) for begin, size in zip(prefixes, lengths, strict=True)]
    positions = torch.cat(spans).to(device)
    row = pages[request, positions // SHAPE.page_size].long() * SHAPE.page_size + positions % SHAPE.page_size
    ring, sink = window_slots(positions, own.long()[request], own.long()[request], windows)
    ends = before + torch.tensor(lengths, device=device)
    ring = torch.where(positions >= ends[request] - windows.ring, ring, -1)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return Batch(tables, StoreSlots(row, ring, sink), lengths, starts, prefixes)


def cached(layer: CachedLayer, batch: Batch, request: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a request as they are read, in the model's basis: float64 [tokens, kv_heads, head_dim]."""
    key, value = layer.format.key.transform, layer.format.value.transform
    k, v = (x.double() for x in reference.gather(layer.cache, batch.tables, request, tokens))
    center = 0 if key.center is None else key.center.double()
    assert key.reading is not None
    assert value.back is not None
    # A query times D scores what is stored: back in the model's basis that is D times it.
    return (
        torch.einsum("thd,hed->the", k + center, key.reading.double()),
        torch.einsum("thd,hde->the", v, value.back.double()),
    )


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Causal attention of the last tokens in float64, with sink logits as one more column."""
    heads = q.double().unflatten(1, (SHAPE.kv_heads, -1))
    logits = torch.einsum("qhgd,thd->qhgt", heads, k) * SM_SCALE
    own = torch.arange(len(q), device=q.device) + len(k) - len(q)
    logits = logits.masked_fill((torch.arange(len(k), device=q.device) > own[:, None])[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, SHAPE.kv_heads, -1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    return torch.einsum("qhgt,thd->qhgd", logits.softmax(-1)[..., : len(k)], v).flatten(1, 2)


def vectors(tokens: int, seed: int, device: torch.device = CPU) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads)
    q, k, v = (
        random_vectors((tokens, count, SHAPE.head_dim), SHAPE.dtype, seed + i, device) for i, count in enumerate(heads)
    )
    return q, k, v


def behind(
    before: list[tuple[torch.Tensor, torch.Tensor]], k: torch.Tensor, v: torch.Tensor, lengths: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of requests with so many new ones, as they are, behind them."""
    parts = [x.double().split(lengths) for x in (k, v)]
    return [(torch.cat([old, a]), torch.cat([read, b])) for (old, read), a, b in zip(before, *parts, strict=True)]


def sinks_of(device: torch.device) -> torch.Tensor:
    """Sink logits as strong as what a head attends to, of another strength for every head."""
    return torch.linspace(1.0, 5.0, SHAPE.q_heads, device=device)


@pytest.mark.parametrize(
    ("way", "centered"),
    [*((way, way not in ("passes", "in place")) for way in WAYS), ("reference", False), ("triton", False)],
)
def test_every_exit(way: str, centered: bool) -> None:
    """Prompts without a prefix; behind one, of lengths that choose the way; single tokens, and a chunk; decode; drafts.

    Each result is that of float64 over what the cache holds, and differs from one without sink logits.
    """
    device = CPU if way == "reference" else HERE
    layer = layer_of(centered, device)
    kernels, sinks = kernels_of(way, layer), sinks_of(device)
    prefixes = [0, 0, 0]
    for seed, lengths in enumerate([[5, 20, 50], [3, 2, 6], [1, 5, 1]]):
        batch = batch_of(prefixes, lengths, device)
        batch.extend_plan = kernels.plan_extend(batch)
        if way == "joined":
            assert batch.extend_plan is not None
            assert (batch.extend_plan.joined is not None) == (seed == 1)
        q, k, v = vectors(sum(lengths), 10 * seed, device)
        before = [cached(layer, batch, request, prefix) for request, prefix in enumerate(prefixes)]
        out = kernels.extend(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE, sinks))
        seen = behind(before, k, v, lengths)
        if batch.extend_plan is not None and batch.extend_plan.decoding is not None:
            # Ragged extends store a chunk of one token first, and then decode.
            for request in [request for request, length in enumerate(lengths) if length == 1]:
                seen[request] = cached(layer, batch, request, prefixes[request] + 1)
        check(out, q, seen, lengths, sinks)
        prefixes = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    batch = batch_of(prefixes, [1, 1, 1], device)
    q, k, v = vectors(3, 90, device)
    batch.tables.kv_lens.add_(1)
    out = kernels.decode(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE, sinks))
    prefixes = [prefix + 1 for prefix in prefixes]
    check(out, q, [cached(layer, batch, request, n) for request, n in enumerate(prefixes)], [1, 1, 1], sinks)
    batch = batch_of(prefixes, [NEW] * 3, device)
    batch.visible = causal_words(NEW, device).repeat(3, 1)
    q, k, v = vectors(3 * NEW, 120, device)
    before = [cached(layer, batch, request, prefix) for request, prefix in enumerate(prefixes)]
    out = kernels.verify(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE, sinks))
    check(out, q, behind(before, k, v, [NEW] * 3), [NEW] * 3, sinks)


def check(
    out: torch.Tensor,
    q: torch.Tensor,
    seen: list[tuple[torch.Tensor, torch.Tensor]],
    lengths: list[int],
    sinks: torch.Tensor,
) -> None:
    """``out`` of chunks ``q`` of so many tokens, each with all keys and values up to its end."""
    chunks = list(zip(q.split(lengths), seen, strict=True))
    want, plain = (torch.cat([exact(own, *read, column) for own, read in chunks]) for column in (sinks, None))
    allowed = TOLERANCE * plain.abs().max()
    assert (out.double() - want).abs().max() <= allowed
    assert (want - plain).abs().max() > 4 * allowed, "sink logits make no difference here"


def test_ranks_share_the_heads() -> None:
    """A tensor-parallel rank with its heads' sink logits and centers gets its part of the whole."""
    center = layer_of(centered=True).format.key.transform
    q, _, _ = vectors(7, 1)
    out, lse, sinks = torch.randn(q.shape), 4 * torch.randn(q.shape[:2]), torch.linspace(-1.0, 3.0, SHAPE.q_heads)
    whole = scale_by_sinks(out, lse, sinks, q, center.plain_center, SM_SCALE)
    for rank in range(SHAPE.kv_heads):
        own, of_rank = slice(rank * SHAPE.gqa, (rank + 1) * SHAPE.gqa), center.of_heads(slice(rank, rank + 1))
        part = scale_by_sinks(out[:, own], lse[:, own], sinks[own], q[:, own], of_rank.plain_center, SM_SCALE)
        torch.testing.assert_close(part, whole[:, own])


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("tokens", [0, 7, 40])
def test_one_launch_gives_what_the_reference_gives(tokens: int, centered: bool) -> None:
    """Also where outputs lie beside others; tokens that attend to nothing keep zeros."""
    q, _, _ = (x.to(HERE) for x in vectors(tokens, 1))
    out = torch.randn(tokens, 2 * SHAPE.q_heads, SHAPE.head_dim, device=HERE).half()[:, ::2]
    lse = 4 * torch.randn(q.shape[:2], device=HERE)
    if tokens:
        out[0], lse[0] = 0, float("-inf")
    center = layer_of(centered, HERE).format.key.transform.plain_center
    sinks = sinks_of(HERE).bfloat16()
    want = scale_by_sinks(out, lse, sinks, q, center, SM_SCALE)
    got = scale_by_sinks_(out, lse, sinks, q, center, SM_SCALE)
    assert got is out
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-5)


def test_nothing_attended_to_gives_zeros() -> None:
    out = torch.full((1, 2, 4), 7.0)
    lse = torch.tensor([[float("-inf"), 0.0]])
    got = scale_by_sinks(out, lse, torch.zeros(2), torch.zeros(1, 2, 4), None, 1.0)
    assert not got[0, 0].any()
    torch.testing.assert_close(got[0, 1], torch.full((4,), 3.5))


@pytest.mark.parametrize("window", [None, 0, 1, 20, 600])
@pytest.mark.parametrize("tokens", [1, 700])
def test_sliding_windows(window: int | None, tokens: int) -> None:
    """In plain torch, over more queries than fit a block: every query sees itself and ``window`` tokens before it."""
    q, k, v = vectors(tokens, 3)
    q, sinks = q[-min(tokens, 600) :], torch.linspace(-1.0, 3.0, SHAPE.q_heads)
    out = attend(q, k, v, SM_SCALE, window, sinks)
    for query in (0, len(q) // 2, len(q) - 1):
        position = query + tokens - len(q)
        first = 0 if window is None else max(position - window, 0)
        seen = slice(first, position + 1)
        want = exact(q[query : query + 1], k[seen].double(), v[seen].double(), sinks)
        torch.testing.assert_close(out[query : query + 1].double(), want, rtol=1e-4, atol=1e-4)
