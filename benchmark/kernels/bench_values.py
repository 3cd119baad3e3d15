"""What it costs to multiply values online: in the store, and back in the kernel that attends.

    python benchmark/kernels/bench_values.py
    python benchmark/kernels/bench_values.py --shapes 1x8192,128x8192 --drafts 4
    python benchmark/kernels/bench_values.py --tp 2                       # what one of two GPUs has of every layer
    python benchmark/kernels/bench_values.py --prompts 1x0+8192,1x8192+8192

One layer of Qwen3-8B on a Hopper GPU: store, attention and output projection, as they follow each other in a step.
``folded`` multiplies no values, as if weights were multiplied; ``online`` does both in the launches that are there;
``apart`` multiplies outputs by a launch of its own. ``of_step`` is what ``online`` adds to 36 layers, relative to the
shortest step there could be: weights and cache read once at the bandwidth that was measured. With ``--drafts`` so many
tokens of every request are verified. Of ``--prompts`` (requests x cached + new tokens) it is what ``online`` adds to
attention and store, relative to these and the products of the layer.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_decode import in_new_process

from oscar_kernels.cache import BatchTables, LayerCache, StoreSlots
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.prepared import PreparedLayer
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.store import store as triton_store
from oscar_kernels.visible import causal_words
from oscar_tools.bench.decode import read_bytes
from oscar_tools.bench.extend import REPLAYS, Case, Served, served
from oscar_tools.bench.report import report
from oscar_tools.bench.store import prepared
from oscar_tools.bench.synthetic import (
    PAGE,
    QWEN3_8B,
    WINDOWS,
    Heads,
    layouts_of,
    random_cache,
    rotation_of,
    shuffled_tables,
)
from oscar_tools.bench.timing import layers_of, read_bandwidth, time_us
from sglang_oscar.attention.gpu import MOST_CUDA_TOKENS

HIDDEN, INTERMEDIATE, LAYERS = 4096, 12288, 36
WEIGHT_BYTES = 15.1e9
"""Read in a step of Qwen3-8B."""
KINDS = ("folded", "online", "apart")
SHAPES = "1x8192,2x8192,4x8192,8x8192,16x8192,32x8192,64x8192,128x8192"


def heads_of(ranks: int) -> Heads:
    """Heads of one of so many GPUs."""
    return Heads(QWEN3_8B.query // ranks, QWEN3_8B.kv // ranks, QWEN3_8B.head_dim)


def transforms(kv_heads: int, seed: int) -> tuple[SideTransform, SideTransform]:
    """A matrix per kv head on either side, with those that undo them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    matrices = torch.randn(2, kv_heads, 128, 128, generator=generator, device="cuda", dtype=torch.float64)
    key, value = torch.linalg.qr(matrices)[0].float()
    return SideTransform(key, clip=0.96, gain=0.98), SideTransform(value, clip=0.92, gain=1.0)


class Layer:
    """A layer with a cache, matrices and an output projection of its own."""

    def __init__(self, cache: LayerCache, heads: Heads, seed: int) -> None:
        self.cache = cache
        key, value = transforms(heads.kv, seed)
        layouts = cache.k_layout, cache.v_layout
        self.online = prepared(layouts, key, value)
        self.folded = prepared(layouts, key, replace(value, matrix=None))
        self.arranged = {True: cuda_store.arrange(self.online), False: cuda_store.arrange(self.folded)}
        self.projection = torch.randn(heads.query * heads.head_dim, HIDDEN, device="cuda").bfloat16() / 64

    def of(self, online: bool) -> PreparedLayer:
        """As the Triton kernels take it."""
        return self.online if online else self.folded


class Step:
    """What all layers of a step share."""

    def __init__(self, heads: Heads, drafts: int, slots: int, tables: BatchTables, cache: LayerCache) -> None:
        batch, new = len(tables.kv_lens), max(drafts, 1)
        fused = torch.randn(batch * new, heads.query + 2 * heads.kv, heads.head_dim, device="cuda").bfloat16()
        self.q, self.k, self.v = fused.split([heads.query, heads.kv, heads.kv], dim=1)
        row = torch.randperm(slots, device="cuda")[: batch * new]
        token = torch.arange(batch * new, device="cuda")
        ring = token // new * cache.windows.ring + token % new
        self.slots = StoreSlots(row, ring, torch.full_like(ring, -1))
        self.words = causal_words(drafts, "cuda").repeat(batch, 1) if drafts else None
        self.tables = tables
        self.workspace = cuda_decode.make_workspace(cache, heads.query, batch, drafts)

    def attend(self, layer: Layer, kind: str) -> torch.Tensor:
        """[tokens, q_heads, head_dim], in the basis of the model; of ``folded`` values in that of the cache."""
        online = kind != "folded"
        given = layer.cache, self.slots, self.k, self.v
        if len(self.q) <= MOST_CUDA_TOKENS:
            q = cuda_store.store(*given, layer.arranged[online], self.q, PAGE, decoding=True)
        else:
            q = triton_store(*given, layer.of(online), q=self.q)
        reading = layer.arranged[True].value.reading if kind == "online" else None
        rest: dict[str, Any] = {"workspace": self.workspace, "reading": reading}
        if self.words is None:
            out = cuda_decode.decode(layer.cache, self.tables, q, QWEN3_8B.sm_scale, **rest)
        else:
            out = cuda_decode.verify(layer.cache, self.tables, self.words, q, QWEN3_8B.sm_scale, **rest)
        return rotate(out, layer.online.value.reading) if kind == "apart" else out

    def call(self, layer: Layer, kind: str) -> Callable[[], object]:
        return lambda: self.attend(layer, kind).flatten(1) @ layer.projection


def measure(bits: str, heads: Heads, batch: int, length: int, drafts: int) -> dict[str, float]:
    """Microseconds of a layer of every kind; how far ``online`` is from ``apart``."""
    layouts = layouts_of(bits, heads.kv, heads.head_dim)
    windows = replace(WINDOWS, ring=WINDOWS.recent + max(drafts, 1))
    tables, slots = shuffled_tables([length] * batch, PAGE)
    layers = max(layers_of(read_bytes(batch, length, layouts)), 8)
    made = [Layer(random_cache(slots, batch, layouts, windows, seed), heads, seed) for seed in range(layers)]
    step = Step(heads, drafts, slots, tables, made[0].cache)
    # Two roundings to 16 bits lie between them; and a result that differs from run to run is a race.
    wanted, first = (step.attend(made[0], kind).double() for kind in ("apart", "online"))
    distance = float((first - wanted).norm() / wanted.norm())
    assert distance < 4e-3, f"{batch} x {length}: online and apart differ by {distance}"
    for _ in range(20):
        assert torch.equal(step.attend(made[0], "online").double(), first), f"{batch} x {length}: runs differ"
    # In turns, so that all kinds meet the same clocks; the best of each.
    runs = [{kind: time_us([step.call(layer, kind) for layer in made]) for kind in KINDS} for _ in range(3)]
    return {kind: min(run[kind] for run in runs) for kind in KINDS} | {"distance": distance}


def prompt_us(load: tuple[int, int, int], kernels: Served, online: bool) -> float:
    """Microseconds of a layer's attention and store of a chunk, as a server extends."""
    assert kernels.ragged is not None
    case = Case(*load, rotation_of(QWEN3_8B.head_dim), online)
    if joined := case.joined(kernels.ragged):
        return time_us([joined], REPLAYS)
    attend = case.by_passes(kernels.ragged, kernels.decode)
    return time_us([attend], REPLAYS) + time_us([case.store], REPLAYS)


def products_us(tokens: int) -> float:
    """Microseconds of a layer's matrix products."""
    sizes = [(HIDDEN, 6144), (4096, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
    pairs = [
        (torch.randn(tokens, rows, device="cuda").bfloat16(), torch.randn(rows, columns, device="cuda").bfloat16())
        for rows, columns in sizes
    ]
    return time_us([lambda: [x @ weight for x, weight in pairs]], REPLAYS)


def prompt_row(load: tuple[int, int, int]) -> dict[str, object]:
    """What values multiplied online add to a chunk of a prompt: requests, cached and new tokens of each."""
    kernels, batch, prefix, chunk = served("auto"), *load
    # In turns, as the steps above.
    runs = [{online: prompt_us(load, kernels, online) for online in (False, True)} for _ in range(3)]
    folded, online = (min(run[kind] for run in runs) for kind in (False, True))
    products = products_us(batch * chunk)
    return {
        "batch": batch, "prefix": prefix, "chunk": chunk, "folded_us": folded, "online_us": online,
        "products_us": products, "of_step": (online - folded) / (folded + products),
    }  # fmt: skip


def step_row(bits: str, shape: str, drafts: int, ranks: int, limit: float) -> dict[str, object]:
    """What they add to a step of one of ``ranks`` GPUs."""
    batch, length = map(int, shape.split("x"))
    heads = heads_of(ranks)
    found = in_new_process(measure, bits, heads, batch, length, drafts)
    size = read_bytes(batch, length, layouts_of(bits, heads.kv, heads.head_dim))
    step = (WEIGHT_BYTES / ranks + LAYERS * size) / limit / 1e3
    return {
        "batch": batch, "length": length, "drafts": drafts, "tp": ranks,
        **{f"{kind}_us": found[kind] for kind in KINDS},
        "online_adds_us": found["online"] - found["folded"], "apart_adds_us": found["apart"] - found["folded"],
        "step_ms": step / 1e3, "of_step": LAYERS * (found["online"] - found["folded"]) / step,
        "distance": found["distance"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--bits", default="k3v2", help="widths of keys and values, such as k2v2")
    parser.add_argument("--shapes", default=SHAPES, help="requests x tokens, separated by commas")
    parser.add_argument("--drafts", type=int, default=0, help="new tokens of a request; 0 for decode")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share a layer's heads")
    parser.add_argument("--prompts", help="requests x cached + new tokens, separated by commas, in place of steps")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    if args.prompts:
        loads = [re.fullmatch(r"(\d+)x(\d+)\+(\d+)", load) for load in args.prompts.split(",")]
        if not all(loads):
            parser.error("--prompts takes loads such as 1x0+8192, separated by commas")
        rows = [in_new_process(prompt_row, tuple(map(int, load.groups()))) for load in loads if load]
    else:
        rows = [step_row(args.bits, shape, args.drafts, args.tp, limit) for shape in args.shapes.split(",")]
    report("values", rows, limit, args.json)


if __name__ == "__main__":
    main()
