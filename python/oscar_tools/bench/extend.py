"""Extend: one layer's attention and storing of a chunk, quantized cache against BF16 and FP8, Qwen3-8B heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch

from oscar_kernels.cache import Chunks, StoreSlots
from oscar_kernels.extend_plan import Decode
from oscar_kernels.layout import RowLayout
from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.rotate import rotate
from oscar_tools.bench import decode_baselines, fa3_baseline, flashinfer_baseline
from oscar_tools.bench.synthetic import (
    PAGE,
    QWEN3_8B,
    WINDOWS,
    layer_format,
    random_cache,
    rotation_of,
    shuffled_tables,
)
from oscar_tools.bench.timing import device, time_us
from sglang_oscar.attention import decode_choice, extend_choice
from sglang_oscar.attention.prefix_copies import PrefixCopies
from sglang_oscar.attention.prompt_store import PromptStore
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.layer import CachedLayer

Q_HEADS, KV_HEADS, HEAD_DIM = QWEN3_8B
LAYOUT = RowLayout(KV_HEADS, HEAD_DIM, 128, torch.bfloat16)
LAYOUTS = LAYOUT, LAYOUT
SM_SCALE = QWEN3_8B.sm_scale
BUDGET = 100 << 30
"""KV budget from which the size of the workspace follows."""
REPLAYS = 7
BACKENDS = get_args(extend_choice.Setting)


class Case:
    """A batch of equal requests: ``prefix`` cached tokens each, ``chunk`` new ones.

    By ``cuda`` kernels where a server has them.
    """

    def __init__(self, batch: int, prefix: int, chunk: int, rotation: torch.Tensor, cuda: bool) -> None:
        self.lens = [prefix] * batch, [chunk] * batch
        # Room for the token that is stored before it is decoded, where a chunk has one only.
        tables, slots = shuffled_tables([prefix + 1] * batch, PAGE)
        self.tables = replace(tables, kv_lens=tables.kv_lens - 1)
        self.cache = random_cache(slots, batch, LAYOUTS, WINDOWS)
        tokens = batch * chunk
        layer = layer_format(LAYOUTS, SideTransform(rotation, clip=0.96), SideTransform(rotation, clip=0.92))
        self.layer = prepare(layer, torch.bfloat16)
        heads = Q_HEADS + 2 * KV_HEADS
        fused = torch.randn(tokens, heads, HEAD_DIM, device=device()).bfloat16()
        self.q, self.k, self.v = fused.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.indptr = torch.arange(batch + 1, dtype=torch.int32, device=device()) * chunk
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device())
        # Of every chunk the newest tokens go to the ring of its request.
        position = torch.arange(tokens, device=device()) % chunk
        ring = (torch.arange(tokens, device=device()) // chunk + 1) * 256 + position % 256
        ring = torch.where(position >= chunk - 256, ring, -1)
        self.slots = StoreSlots(torch.arange(tokens, device=device()), ring, nowhere)
        self.chunks = CachedLayer(random_cache(tokens, batch, LAYOUTS, WINDOWS), layer)
        self.stored = PromptStore({id(self.chunks): self.layer}, PAGE)
        if cuda:
            self.stored.arrange([(self.chunks, Q_HEADS)], torch.bfloat16)

    def triton(self) -> object:
        """All of it by our own kernel."""
        rotated, values = self.rotated()
        chunks = Chunks(self.q, self.k, values, self.indptr)
        return self.back(extend(self.cache, self.tables, chunks, rotated, SM_SCALE))

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and values as they meet what is cached."""
        key, value = self.layer.key.reading, self.layer.value.matrix
        assert key is not None
        return rotate(self.q, key), self.v if value is None else rotate(self.v, value)

    def back(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs in the basis of the model."""
        reading = self.layer.value.reading
        return out if reading is None else rotate(out, reading)

    def by_passes(self, ragged: RaggedExtend, decode: Decode) -> Callable[[], object]:
        """Chunk and dequantized prefix by a stock kernel; prefixes of short chunks by the decode kernel."""
        planner, limits = ragged.planner, ragged.planner.limits
        planner.limits = replace(limits, joined=False)
        plan, planner.limits = planner.plan(self.tables, *self.lens), limits

        def call() -> object:
            rotated, values = self.rotated() if plan.has_prefix else (None, self.v)
            chunks = Chunks(self.q, self.k, values, self.indptr)
            out = ragged.run(plan, [self.cache], self.tables, chunks, rotated, SM_SCALE)
            if plan.decoding is not None:
                assert rotated is not None
                own = plan.decoding.tokens
                out[own] = decode(self.cache, plan.decoding.tables, rotated[own], SM_SCALE)
            return self.back(out) if plan.has_prefix else out

        return call

    def joined(self, ragged: RaggedExtend) -> Callable[[], object] | None:
        """Chunk and dequantized prefix at once, the store between them; None for a batch that is not joined."""
        plan = ragged.planner.plan(self.tables, *self.lens).joined
        if plan is None:
            return None

        def call() -> object:
            copies = ragged.load_joined(plan, [self.cache], self.tables)
            rotated = self.stored(self.chunks, self.slots, self.k, self.v, self.q, copies)
            assert rotated is not None
            return self.back(ragged.run_joined(copies, rotated, SM_SCALE))

        return call

    def store(self) -> object:
        """What follows attention: keys and values rotated."""
        return self.stored(self.chunks, self.slots, self.k, self.v)

    def copy(self) -> Callable[[], object]:
        """What follows attention without quantization."""
        pool = torch.empty(2, len(self.q) + PAGE, KV_HEADS, HEAD_DIM, device=device(), dtype=torch.bfloat16)

        def call() -> None:
            pool[0].index_copy_(0, self.slots.row, self.k)
            pool[1].index_copy_(0, self.slots.row, self.v)

        return call


def sdpa_call(batch: int, prefix: int, chunk: int) -> Callable[[], object]:
    """Causal over the chunk alone, else over prefix and chunk with the chunk at the end."""
    keys = prefix + chunk
    q = torch.randn(batch, Q_HEADS, chunk, HEAD_DIM, device=device(), dtype=torch.bfloat16)
    k, v = (torch.randn(batch, KV_HEADS, keys, HEAD_DIM, device=device(), dtype=torch.bfloat16) for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention
    if prefix == 0:
        return lambda: attention(q, k, v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(chunk, keys)
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
    return lambda: attention(q, k, v, attn_mask=mask)


def prefill_us(name: str, batch: int, prefix: int, chunk: int) -> float:
    """Microseconds of a stock kernel's attention to a batch of equal requests.

    Args:
        name: ``flashinfer``, ``fa3``, ``fa3_fp8`` or ``torch``.
        batch, prefix, chunk: requests, cached and new tokens of each.
    """
    lens = [prefix] * batch, [chunk] * batch
    if name == "flashinfer":
        call = flashinfer_baseline.prefill_call(*lens)
    elif name == "torch":
        call = sdpa_call(batch, prefix, chunk)
    else:
        call = fa3_baseline.prefill_call(QWEN3_8B, *lens, decode_baselines.DTYPES[name.partition("_")[2]])
    return time_us([call], REPLAYS)


def stock_names() -> list[str]:
    """Stock prefills that are here; PyTorch's attention where there are none."""
    return [name for name in ("flashinfer", "fa3", "fa3_fp8") if decode_baselines.installed(name)] or ["torch"]


class Served(NamedTuple):
    """What a server extends with on this card: a backend's name, the decode kernel, a stock kernel if it has one."""

    backend: str
    decode: Decode
    ragged: RaggedExtend | None


def served(setting: extend_choice.Setting, budget: int = BUDGET) -> Served:
    """The kernels of a setting of SGLANG_OSCAR_EXTEND_BACKEND, compiled and loaded.

    Raises:
        Int2Error: they cannot be had.
    """
    cache = random_cache(PAGE, 1, LAYOUTS, WINDOWS)
    backend = extend_choice.choose(setting, "cuda", (HEAD_DIM, HEAD_DIM), sink_logits=False)
    assert backend is not None
    stock = backend != "triton"
    task = decode_choice.DecodeTask("auto", [cache], PAGE, Q_HEADS, torch.bfloat16, short_chunks=stock)
    decode = decode_choice.choose(task, max_batch=256)
    if backend == "triton":
        return Served(backend, decode, None)
    geometry = Geometry.uniform(LAYOUT, WINDOWS, torch.bfloat16, layers=1)
    size = extend_choice.workspace(backend, geometry.formats[0], Q_HEADS, torch.bfloat16, budget)
    copies = PrefixCopies()
    if isinstance(decode, decode_choice.CudaDecode):
        copies.arrange([cache], PAGE, torch.bfloat16)
    return Served(backend, decode, extend_choice.ragged_extend(size, geometry, device(), decode, copies))


def extend_row(case_of: tuple[int, int, int], kernels: Served) -> dict[str, Any]:
    """Microseconds of a load: attention apart (``us``), store, both joined where a server joins them, and our Triton
    kernel.

    Args:
        case_of: requests, tokens of prefix and of chunk.
        kernels: that a server has here.
    """
    cuda, ragged = isinstance(kernels.decode, decode_choice.CudaDecode), kernels.ragged
    case = Case(*case_of, rotation_of(HEAD_DIM), cuda)
    triton_us = time_us([case.triton], REPLAYS)
    us = triton_us if ragged is None else time_us([case.by_passes(ragged, kernels.decode)], REPLAYS)
    joined = None if ragged is None else case.joined(ragged)
    joined_us = None if joined is None else time_us([joined], REPLAYS)
    store_us, copy_us = (time_us([call], REPLAYS) for call in (case.store, case.copy()))
    return {
        "us": us, "store_us": store_us, "joined_us": joined_us, "TFLOP/s": flops(*case_of) / us / 1e6,
        "backend": kernels.backend, "triton_us": triton_us, "copy_us": copy_us,
    }  # fmt: skip


def flops(batch: int, prefix: int, chunk: int) -> float:
    """Floating-point operations of causal attention to a load."""
    return 4 * batch * Q_HEADS * HEAD_DIM * chunk * (prefix + chunk / 2)
