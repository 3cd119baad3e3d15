"""Extend: one layer's attention and storing of a chunk, INT2 cache against BF16 and FP8, Qwen3-8B heads.

``us`` is attention to chunk and prefix apart, query rotation, dequantization and merging included; ``store_us`` is
rotation, quantization and storing of the chunk. ``joined_us`` is all of that for a batch whose prefixes and chunks are
attended to at once, which a server then does; null for others. The baseline is the faster of FlashInfer's and
FlashAttention-3's BF16 prefill (PyTorch's where neither is installed) and the plain copy of keys and values into a BF16
cache. ``overhead`` compares what a server does. ``fa3_fp8_us`` is FlashAttention-3's prefill in FP8, the copy left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import fa3_baseline
import flashinfer_baseline
import torch
from harness import Heads, layer_format, random_cache, read_bandwidth, report, shuffled_tables, time_us

from oscar_kernels.cache import StoreSlots, Windows
from oscar_kernels.extend_plan import Decode
from oscar_kernels.layout import RowLayout
from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.store import store
from sglang_oscar.attention import decode_choice, extend_choice
from sglang_oscar.formats.geometry import Geometry

SHAPES = [
    (1, 0, 8192), (8, 0, 1024), (1, 8192, 8192), (1, 32_768, 8192), (1, 32_768, 2048), (1, 131_072, 2048),
    (1, 32_768, 256), (1, 2048, 128), (1, 8064, 128), (8, 8192, 256), (8, 8192, 64), (1, 131_072, 32),
    (1, 131_072, 16), (1, 131_072, 4), (8, 8192, 32), (8, 8192, 16), (8, 8192, 4), (64, 8192, 4), (64, 8192, 1),
]  # fmt: skip
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
LAYOUT = RowLayout(KV_HEADS, HEAD_DIM, 128, torch.bfloat16)
LAYOUTS = LAYOUT, LAYOUT
WINDOWS = Windows(64, 256, 256)
SM_SCALE = HEAD_DIM**-0.5
BUDGET = 100 << 30
"""KV budget from which the size of the workspace follows."""


class Case:
    """A batch of equal requests: ``prefix`` cached tokens each, ``chunk`` new ones."""

    def __init__(self, batch: int, prefix: int, chunk: int, rotation: torch.Tensor) -> None:
        self.lens = [prefix] * batch, [chunk] * batch
        # Room for the token that is stored before it is decoded, where a chunk has one only.
        tables, slots = shuffled_tables([prefix + 1] * batch, PAGE)
        self.tables = replace(tables, kv_lens=tables.kv_lens - 1)
        self.cache = random_cache(slots, batch, LAYOUTS, WINDOWS)
        tokens = batch * chunk
        layer = layer_format(LAYOUTS, SideTransform(rotation, clip=0.96), SideTransform(clip=0.92))
        self.layer = prepare(layer, torch.bfloat16)
        heads = Q_HEADS + 2 * KV_HEADS
        fused = torch.randn(tokens, heads, HEAD_DIM, device="cuda").bfloat16()
        self.q, self.k, self.v = fused.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * chunk
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        # Of every chunk the newest tokens go to the ring of its request.
        position = torch.arange(tokens, device="cuda") % chunk
        ring = (torch.arange(tokens, device="cuda") // chunk + 1) * 256 + position % 256
        ring = torch.where(position >= chunk - 256, ring, -1)
        self.slots = StoreSlots(torch.arange(tokens, device="cuda"), ring, nowhere)
        self.chunks = random_cache(tokens, batch, LAYOUTS, WINDOWS)

    def triton(self) -> object:
        """All of it by our own kernel."""
        rotated = rotate(self.q, self.layer.key.reading)
        return extend(self.cache, self.tables, self.q, self.k, self.v, self.indptr, rotated, SM_SCALE)

    def by_passes(self, ragged: RaggedExtend, decode: Decode) -> Callable[[], object]:
        """Chunk and dequantized prefix by a stock kernel; prefixes of short chunks by the decode kernel."""
        planner, limits = ragged.planner, ragged.planner.limits
        planner.limits = replace(limits, joined=False)
        plan, planner.limits = planner.plan(self.tables, *self.lens), limits

        def call() -> object:
            rotated = rotate(self.q, self.layer.key.reading) if plan.has_prefix else None
            out = ragged.run(plan, self.cache, self.tables, self.q, self.k, self.v, self.indptr, rotated, SM_SCALE)
            if plan.decoding is not None:
                own = plan.decoding.tokens
                out[own] = decode(self.cache, plan.decoding.tables, rotated[own], SM_SCALE)
            return out

        return call

    def joined(self, ragged: RaggedExtend) -> Callable[[], object] | None:
        """Chunk and dequantized prefix at once, the store between them; None for a batch that is not joined."""
        plan = ragged.planner.plan(self.tables, *self.lens).joined
        if plan is None:
            return None

        def call() -> object:
            copies = ragged.load_joined(plan, self.cache, self.tables)
            rotated = store(self.chunks, self.slots, self.k, self.v, self.layer, q=self.q, copies=copies)
            return ragged.run_joined(copies, rotated, SM_SCALE)

        return call

    def store(self) -> object:
        """What follows attention: keys rotated, values absorbed."""
        return store(self.chunks, self.slots, self.k, self.v, self.layer)

    def copy(self) -> Callable[[], object]:
        """What follows attention without quantization."""
        pool = torch.empty(2, len(self.q) + PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

        def call() -> None:
            pool[0].index_copy_(0, self.slots.row, self.k)
            pool[1].index_copy_(0, self.slots.row, self.v)

        return call


def sdpa_call(batch: int, prefix: int, chunk: int) -> Callable[[], object]:
    """Causal over the chunk alone, else over prefix and chunk with the chunk at the end."""
    keys = prefix + chunk
    q = torch.randn(batch, Q_HEADS, chunk, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, KV_HEADS, keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention
    if prefix == 0:
        return lambda: attention(q, k, v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(chunk, keys)
    k, v = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
    return lambda: attention(q, k, v, attn_mask=mask)


def stock_us(batch: int, prefix: int, chunk: int) -> dict[str, float]:
    """Microseconds of stock attention to a batch of equal requests, by what computes it."""
    lens, heads = ([prefix] * batch, [chunk] * batch), Heads(Q_HEADS, KV_HEADS, HEAD_DIM)
    makers: dict[str, Callable[[], Callable[[], object]]] = {}
    if flashinfer_baseline.available():
        makers["flashinfer"] = lambda: flashinfer_baseline.prefill_call(*lens)
    if fa3_baseline.available():
        makers["fa3"] = lambda: fa3_baseline.prefill_call(heads, *lens, torch.bfloat16)
        makers["fa3_fp8"] = lambda: fa3_baseline.prefill_call(heads, *lens, torch.float8_e4m3fn)
    found = {}
    for name, make in (makers or {"torch": lambda: sdpa_call(batch, prefix, chunk)}).items():
        found[name] = time_us([make()], replays=7)
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--backend", choices=("auto", "flashinfer", "fa3", "triton"), default="auto", help="of INT2")
    args = parser.parse_args()
    limit = read_bandwidth()
    rotation = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64))[0].float().cuda()
    ragged, cache = None, random_cache(PAGE, 1, LAYOUTS, WINDOWS)
    backend = extend_choice.choose(args.backend, "cuda", HEAD_DIM, sink_logits=False)
    assert backend is not None
    decode = decode_choice.choose("auto", [cache], PAGE, Q_HEADS, torch.bfloat16, 256, short_chunks=backend != "triton")
    if backend != "triton":
        geometry = Geometry.uniform(LAYOUT, WINDOWS, torch.bfloat16, layers=1)
        size = extend_choice.workspace(backend, geometry.formats[0], Q_HEADS, torch.bfloat16, BUDGET)
        ragged = extend_choice.ragged_extend(size, geometry, torch.device("cuda"), decode)
    rows: list[dict[str, object]] = []
    for batch, prefix, chunk in SHAPES:
        case = Case(batch, prefix, chunk, rotation)
        triton_us = time_us([case.triton], replays=7)
        us = triton_us if ragged is None else time_us([case.by_passes(ragged, decode)], replays=7)
        joined = None if ragged is None else case.joined(ragged)
        joined_us = None if joined is None else time_us([joined], replays=7)
        store_us, copy_us = (time_us([call], replays=7) for call in (case.store, case.copy()))
        del case, joined
        torch.cuda.empty_cache()
        stock = stock_us(batch, prefix, chunk)
        baseline = min((name for name in stock if not name.endswith("fp8")), key=stock.__getitem__)
        baseline_us = stock[baseline]
        flops = 4 * batch * Q_HEADS * HEAD_DIM * chunk * (prefix + chunk / 2)
        rows.append({
            "batch": batch, "prefix": prefix, "chunk": chunk, "us": us, "store_us": store_us, "joined_us": joined_us,
            "TFLOP/s": flops / us / 1e6, "backend": backend, "triton_us": triton_us,
            "baseline": baseline, "baseline_us": baseline_us, "copy_us": copy_us,
            "speedup": baseline_us / us, "overhead": (joined_us or us + store_us) / (baseline_us + copy_us) - 1,
            **{f"{name}_us": took for name, took in stock.items()},
        })  # fmt: skip
    report("extend", rows, limit, args.json)


if __name__ == "__main__":
    main()
