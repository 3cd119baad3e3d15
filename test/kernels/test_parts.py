"""Layers in parts, each of neighbouring kv heads with rows of its own, at every exit of attention, against float64.

Parts of one head and of two, of another coding and of more bits; queries, keys and values are slices of one product, so
a part has views of them. On the interpreter, the CUDA emulator, or a GPU where there is one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import test_sink_logits as exits
import torch
from kernel_cases import empty_cache, random_transform, random_vectors
from test_ragged_extend import TorchRagged
from test_sink_logits import CPU, HERE, PAGES, SM_SCALE, batch_of, cached, check, sinks_of

from oscar_kernels.cache import Windows
from oscar_kernels.cuda.store import arrange
from oscar_kernels.format import CutFormat
from oscar_kernels.layout import CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.decode import decode
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.decode_choice import CudaDecode, TritonDecode
from sglang_oscar.attention.gpu import GpuKernels
from sglang_oscar.attention.kernels import Kernels
from sglang_oscar.attention.layer_attention import TorchKernels
from sglang_oscar.attention.prompt_store import PromptStore
from sglang_oscar.memory.layer import CachedLayer, CutLayer
from support.cuda_emulator import COMPILER, emulated
from support.hopper import HOPPER

WHOLE = replace(exits.SHAPE, kv_heads=3, gqa=2, windows=Windows(sink=16, recent=24, ring=32), page_size=32)
PARTS = [
    replace(WHOLE, kv_heads=1, k_bits=3, v_coding=SYMMETRIC),
    replace(WHOLE, kv_heads=2, k_coding=CODEBOOK, v_coding=SYMMETRIC),
]
WAYS = ["reference", "triton", "short", "in place", "joined"]
CUDA = pytest.mark.skipif(
    not HOPPER and (COMPILER is None or torch.cuda.is_available()), reason="no GPU or emulator for it"
)


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "SHAPE", WHOLE)


def cut_layer(device: torch.device) -> CutLayer:
    """Transforms for every kv head, keys centered; the memory of every part is NaN."""
    heads, d = WHOLE.kv_heads, WHOLE.head_dim
    center = 3 * torch.randn(heads, d, generator=torch.Generator().manual_seed(6)).to(device)
    matrices = [[x.to(device) for x in random_transform(d, seed, heads)] for seed in (4, 5)]
    key, value = SideTransform(*matrices[0], center, 0.96, 0.98), SideTransform(*matrices[1], clip=0.92, gain=1.0)
    parts, first = [], 0
    for shape in PARTS:
        own = slice(first, first + shape.kv_heads)
        made = shape.format(key.of_heads(own), value.of_heads(own)).to(device)
        cache = replace(empty_cache(shape, 3 * PAGES + 1, 3, device, fill=float("nan")), k_codebook=made.key.codebook)
        parts.append(CachedLayer(cache, made))
        first += shape.kv_heads
    return CutLayer(tuple(parts))


def kernels_of(way: str, layer: CutLayer) -> Kernels:
    """The reference, or what a GPU runs."""
    if way == "reference":
        return TorchKernels()
    made: Any = GpuKernels.__new__(GpuKernels)
    made._prepared = {id(part): prepare(part.format, WHOLE.dtype) for part in layer.parts}
    made._decode, made._arranged, made._ragged = TritonDecode(torch.empty(1 << 25, device=HERE)), {}, None
    made._prompts = PromptStore(made._prepared, WHOLE.page_size)
    made._page_size = WHOLE.page_size
    if way == "cuda":
        made._decode = CudaDecode(torch.zeros(1 << 23, device=HERE), halved=True)
        made._arranged = {id(part): arrange(made._prepared[id(part)]) for part in layer.parts}
    elif way != "triton":
        heads = CutFormat(tuple(part.format for part in layer.parts))
        planner = RaggedPlanner(heads, WHOLE.q_heads, WHOLE.dtype, exits.LIMITS[way], HERE, TorchRagged)
        made._ragged = RaggedExtend(planner, decode)
    return made


def fused(tokens: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys and values as a model has them."""
    heads = [WHOLE.q_heads, WHOLE.kv_heads, WHOLE.kv_heads]
    both = random_vectors((tokens, sum(heads), WHOLE.head_dim), WHOLE.dtype, seed, device)
    return list(both.split(heads, 1))


def read(layer: CutLayer, batch: Batch, request: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads as they are read, in the model's basis."""
    k, v = zip(*(cached(part, batch, request, tokens) for part in layer.parts), strict=True)
    return torch.cat(k, 1), torch.cat(v, 1)


def filled(kernels: Kernels, layer: CutLayer, lengths: list[int], device: torch.device) -> None:
    """Prompts of these lengths, stored."""
    batch = batch_of([0] * len(lengths), lengths, device)
    q, k, v = fused(sum(lengths), 3, device)
    for part, own in Call(q, k, v, batch.slots.row, 0, SM_SCALE).apart(layer):
        kernels.store(part, batch.slots, own.k, own.v)


@pytest.mark.parametrize("way", WAYS)
def test_every_exit(way: str) -> None:
    """Prompts without a prefix; behind one, by as many tokens as choose the way; a token each, and a chunk; decode."""
    device = CPU if way == "reference" else HERE
    layer = cut_layer(device)
    kernels, sinks, prefixes = kernels_of(way, layer), sinks_of(device), [0, 0, 0]
    for seed, lengths in enumerate([[5, 20, 60], [3, 2, 6], [1, 5, 1]]):
        batch = batch_of(prefixes, lengths, device)
        batch.extend_plan = kernels.plan_extend(batch)
        q, k, v = fused(sum(lengths), 10 * seed, device)
        before = [read(layer, batch, request, prefix) for request, prefix in enumerate(prefixes)]
        k64, v64 = k.double(), v.double()
        out = kernels.extend(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE, sinks))
        own = zip(before, k64.split(lengths), v64.split(lengths), strict=True)
        seen = [(torch.cat([old, a]), torch.cat([read_, b])) for (old, read_), a, b in own]
        if batch.extend_plan is not None and batch.extend_plan.decoding is not None:
            for request in [request for request, length in enumerate(lengths) if length == 1]:
                seen[request] = read(layer, batch, request, prefixes[request] + 1)
        check(out, q, seen, lengths, sinks)
        prefixes = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    decoded(kernels, layer, prefixes, device)


def decoded(kernels: Kernels, layer: CutLayer, prefixes: list[int], device: torch.device) -> None:
    """A step of decode behind prompts, with sink logits."""
    batch, sinks = batch_of(prefixes, [1] * len(prefixes), device), sinks_of(device)
    q, k, v = fused(len(prefixes), 90, device)
    batch.tables.kv_lens.add_(1)
    out = kernels.decode(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE, sinks))
    check(out, q, [read(layer, batch, request, n + 1) for request, n in enumerate(prefixes)], [1, 1, 1], sinks)


@CUDA
def test_cuda_kernels() -> None:
    """Store and decode, a launch of each for every part."""
    layer, lengths = cut_layer(HERE), [5, 60, 200]
    kernels = kernels_of("cuda", layer)
    filled(kernels, layer, lengths, HERE)
    with nullcontext() if HOPPER else emulated():
        decoded(kernels, layer, lengths, HERE)


@pytest.mark.parametrize("way", ["reference", "triton", pytest.param("cuda", marks=CUDA)])
def test_verification(way: str) -> None:
    """Several tokens of a request at once: as a chunk of as many, of which each is read from the ring."""
    device, tokens = CPU if way == "reference" else HERE, 4
    layer, prefixes = cut_layer(device), [30, 60, 200]
    kernels = kernels_of(way, layer)
    filled(kernels, layer, prefixes, device)
    batch = batch_of(prefixes, [tokens] * 3, device)
    seen = [read(layer, batch, request, n) for request, n in enumerate(prefixes)]
    batch.visible = torch.tensor([1, 3, 7, 15], device=device).expand(3, tokens).contiguous()
    q, k, v = fused(3 * tokens, 90, device)
    with emulated() if way == "cuda" and not HOPPER else nullcontext():
        out = kernels.verify(layer, batch, Call(q, k, v, batch.slots.row, 0, SM_SCALE))
    both = zip(k.double().split(tokens), v.double().split(tokens), seen, strict=True)
    whole = [(torch.cat([old_k, own_k]), torch.cat([old_v, own_v])) for own_k, own_v, (old_k, old_v) in both]
    for request, (own, (keys, values)) in enumerate(zip(q.split(tokens), whole, strict=True)):
        wanted = exits.exact(own, keys, values, None)
        found = out[request * tokens : (request + 1) * tokens].double()
        assert (found - wanted).abs().max() < exits.TOLERANCE * values.abs().max()
