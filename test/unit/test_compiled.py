"""Attention inside torch.compile: one graph, the eager result, and nothing dropped or made a constant."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import utils
from torch._dynamo.testing import CompileCounterWithBackend

from oscar_kernels.cache import StoreSlots
from oscar_kernels.transform import SideTransform
from sglang_oscar.attention import compiled
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.memory.layer import CachedLayer

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from kernel_cases import Shape, filled_batch, random_rotation

CPU = torch.device("cpu")
SHAPE = Shape()
LAYERS, HIDDEN = 2, 96
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
)


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """On, other than in servers of tests."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


class Watched(TorchKernels):
    """The reference, which notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def decode(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        # The stride of a dimension of size 1 means nothing.
        strides = tuple(x.stride()[len(x) == 1 :] for x in (call.q, call.k, call.v))
        self.calls.append((call.q.shape, strides, call.q.dtype, call.sm_scale))
        return super().decode(layer, batch, call)


def make_backend(lengths: list[int], values_online: bool = True) -> tuple[OscarAttentionBackend, torch.Tensor]:
    """A backend with filled caches whose batch is being decoded, and where its new tokens go."""
    backend: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    backend.kernels, backend.q_heads = Watched(), SHAPE.q_heads
    backend.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=None)
    rotation = random_rotation(SHAPE.head_dim, 1, CPU)
    backend.cache = SimpleNamespace(layers={})
    for layer in range(LAYERS):
        made = filled_batch(SHAPE, lengths, CPU, seed=100 * layer)
        value = SideTransform(rotation if values_online else None, clip=0.92)
        params = CachedLayer(made.cache, SHAPE.format(SideTransform(rotation, clip=0.96), value))
        backend.cache.layers[layer] = params
    # Pages and rows follow from the seed; every layer has those of the last.
    tables, windows = made.tables, SHAPE.windows
    newest = tables.kv_lens.long() - 1
    pages = tables.page_table.gather(1, (newest // SHAPE.page_size)[:, None])[:, 0]
    sink = torch.where(newest < windows.sink, tables.sink_block * windows.sink + newest, -1)
    ring = tables.ring_row * windows.ring + newest % windows.ring
    backend.batch = Batch(tables, StoreSlots(row=ring, ring=ring, sink=sink))
    for params in list(backend.cache.layers.values())[:-1]:
        for name in ("k_rows", "v_rows", "k_sink", "v_sink", "k_ring", "v_ring"):
            getattr(params.cache, name).copy_(getattr(made.cache, name))
    return backend, pages * SHAPE.page_size + newest % SHAPE.page_size


class Model(torch.nn.Module):
    """Projections and attention, as in a layer of SGLang's models: q, k and v are slices of one product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        heads = [SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads]
        self.sizes = [count * SHAPE.head_dim for count in heads]
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, sum(self.sizes)) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(self.sizes[0], HIDDEN) for _ in range(LAYERS))
        self.attn = torch.nn.ModuleList(
            RadixAttention(SHAPE.q_heads, SHAPE.head_dim, 0.1 + layer, SHAPE.kv_heads, layer) for layer in range(LAYERS)
        )
        self.to(SHAPE.dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        for qkv, attn, out in zip(self.qkv, self.attn, self.out, strict=True):
            q, k, v = qkv(x).split(self.sizes, dim=-1)
            x = x + out(attn(torch.tanh(q), k, v, forward_batch))
        return x


@contextmanager
def decoding(backend: OscarAttentionBackend, slots: torch.Tensor) -> Iterator[Any]:
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        yield SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=slots)


def same_caches(a: OscarAttentionBackend, b: OscarAttentionBackend) -> bool:
    """Whether two backends' caches agree bit for bit, NaN included."""
    pairs = zip(a.cache.layers.values(), b.cache.layers.values(), strict=True)
    return all(
        torch.equal(getattr(x.cache, name).view(torch.uint8), getattr(y.cache, name).view(torch.uint8))
        for x, y in pairs
        for name in ("k_rows", "v_rows", "k_sink", "v_sink", "k_ring", "v_ring")
    )


def inputs(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(SHAPE.dtype)


@pytest.mark.parametrize("values_online", [True, False])
def test_one_graph_gives_the_eager_result(values_online: bool) -> None:
    """Several batches of the same size, with other tables and slots each, through one compiled graph."""
    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for seed, lengths in enumerate([[70, 5, 33], [71, 6, 34], [17, 90, 1]]):
        eager, slots = make_backend(lengths, values_online)
        traced = copy.deepcopy(eager)
        x = inputs(len(lengths), seed)
        with decoding(eager, slots) as forward_batch:
            expected = model(x, forward_batch)
        with decoding(traced, slots) as forward_batch:
            got = fast(x, forward_batch)
        assert torch.equal(expected, got)
        assert not expected.isnan().any()
        assert same_caches(eager, traced)
        assert len(traced.kernels.calls) == LAYERS
    assert counter.frame_count == 1


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("how", ["aot_eager", INDUCTOR])
def test_kernels_get_the_strides_of_eager_code(how: str, tokens: int) -> None:
    """Values are a slice of the projections' output, and what a kernel is given is what it is given in eager code."""
    eager, slots = make_backend([20] * tokens)
    traced, model, x = copy.deepcopy(eager), Model(), inputs(tokens, 5)
    with decoding(eager, slots) as forward_batch:
        expected = model(x, forward_batch)
    with decoding(traced, slots) as forward_batch:
        got = torch.compile(model, backend=how, fullgraph=True, dynamic=False)(x, forward_batch)
    assert eager.kernels.calls[0][1][2] == (sum(model.sizes), SHAPE.head_dim, 1)[tokens == 1 :]
    assert traced.kernels.calls == eager.kernels.calls
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("how", ["aot_eager", INDUCTOR])
def test_a_call_whose_result_nobody_reads_is_kept(how: str) -> None:
    """The cache is written all the same, once for each call, although arguments are equal."""
    backend, slots = make_backend([20])
    attention = RadixAttention(SHAPE.q_heads, SHAPE.head_dim, 0.1, SHAPE.kv_heads, 0)

    def store_only(qkv: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        q, k, v = qkv.split([heads * SHAPE.head_dim for heads in (SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads)], -1)
        attention(q, k, v, forward_batch)
        attention(q, k, v, forward_batch)
        return qkv + 1

    qkv = torch.randn(1, (SHAPE.q_heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim).to(SHAPE.dtype)
    before = backend.cache.layers[0].cache.k_rows.clone()
    with decoding(backend, slots) as forward_batch:
        torch.compile(store_only, backend=how, fullgraph=True)(qkv, forward_batch)
    assert len(backend.kernels.calls) == 2
    assert not torch.equal(before, backend.cache.layers[0].cache.k_rows)


def test_eager_code_does_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> torch.Tensor:
        raise AssertionError("eager code called the operator")

    backend, slots = make_backend([20])
    monkeypatch.setattr(compiled, "decode", never)
    with decoding(backend, slots) as forward_batch:
        Model()(inputs(1, 0), forward_batch)
    assert len(backend.kernels.calls) == LAYERS


def untraceable(change: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    return torch._dynamo.disable(lambda **tensors: change(tensors["q"]))


def test_norms_of_queries_and_keys_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang calls a kernel that ends a graph; eager code still does."""
    compiled.prepare()
    compiled.prepare()  # once a process, however many backends there are
    calls = []
    monkeypatch.setattr(utils, "_is_cuda", True)
    monkeypatch.setattr(utils, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=CONFIG)))
    monkeypatch.setattr(utils, "can_use_fused_inplace_qknorm", lambda *args: True)
    monkeypatch.setattr(utils, "fused_inplace_qknorm", untraceable(calls.append))

    class Norm(torch.nn.Module):
        variance_epsilon = 1e-6
        weight = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[-1] == SHAPE.head_dim
            return torch.nn.functional.rms_norm(x, x.shape[-1:])

    def normed(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _ = qkv.split([4 * SHAPE.head_dim, 2 * SHAPE.head_dim, 2 * SHAPE.head_dim], -1)
        return utils.apply_qk_norm(q, k, norm, norm, SHAPE.head_dim, alt_stream=None)

    norm = Norm()
    qkv = torch.randn(3, 8 * SHAPE.head_dim)
    normed(qkv)
    assert len(calls) == 1
    q, k = torch.compile(normed, backend="aot_eager", fullgraph=True)(qkv)
    assert len(calls) == 1
    for got, begin, heads in ((q, 0, 4), (k, 4, 2)):
        plain = qkv.view(3, 8, SHAPE.head_dim)[:, begin : begin + heads]
        torch.testing.assert_close(got, norm(plain).reshape(3, -1))


CONFIG = SimpleNamespace(prefill=SimpleNamespace(tc_compiler="eager"))
