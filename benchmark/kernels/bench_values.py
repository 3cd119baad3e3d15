"""What it costs to multiply values online: in the store, and back in the kernel that attends.

    python benchmark/kernels/bench_values.py
    python benchmark/kernels/bench_values.py --shapes 1x8192,128x8192 --drafts 4

One layer of Qwen3-8B on a Hopper GPU: store, attention and output projection, as they follow each other in a step.
``folded`` multiplies no values, as if weights were multiplied; ``online`` does both in the launches that are there;
``apart`` multiplies outputs by a launch of its own. ``of_step`` is what ``online`` adds to 36 layers, relative to the
shortest step there could be: weights and cache read once at the bandwidth that was measured. With ``--drafts`` so many
tokens of every request are verified.
"""

from __future__ import annotations

import argparse
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
from oscar_tools.bench.report import report
from oscar_tools.bench.store import prepared
from oscar_tools.bench.synthetic import PAGE, QWEN3_8B, WINDOWS, layouts_of, random_cache, shuffled_tables
from oscar_tools.bench.timing import layers_of, read_bandwidth, time_us
from sglang_oscar.attention.gpu import MOST_CUDA_TOKENS

HEADS = QWEN3_8B
HIDDEN, LAYERS = 4096, 36
WEIGHT_BYTES = 15.1e9
"""Read in a step of Qwen3-8B."""
KINDS = ("folded", "online", "apart")
SHAPES = "1x8192,2x8192,4x8192,8x8192,16x8192,32x8192,64x8192,128x8192"


def transforms(seed: int) -> tuple[SideTransform, SideTransform]:
    """A matrix per kv head on either side, with those that undo them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    matrices = torch.randn(2, HEADS.kv, 128, 128, generator=generator, device="cuda", dtype=torch.float64)
    key, value = torch.linalg.qr(matrices)[0].float()
    return SideTransform(key, clip=0.96, gain=0.98), SideTransform(value, clip=0.92, gain=1.0)


class Layer:
    """A layer with a cache, matrices and an output projection of its own."""

    def __init__(self, cache: LayerCache, seed: int) -> None:
        self.cache = cache
        key, value = transforms(seed)
        layouts = cache.k_layout, cache.v_layout
        self.online = prepared(layouts, key, value)
        self.folded = prepared(layouts, key, replace(value, matrix=None))
        self.arranged = {True: cuda_store.arrange(self.online), False: cuda_store.arrange(self.folded)}
        self.projection = torch.randn(HIDDEN, HIDDEN, device="cuda").bfloat16() / 64

    def of(self, online: bool) -> PreparedLayer:
        """As the Triton kernels take it."""
        return self.online if online else self.folded


class Step:
    """What all layers of a step share."""

    def __init__(
        self, batch: int, length: int, drafts: int, slots: int, tables: BatchTables, cache: LayerCache
    ) -> None:
        new = max(drafts, 1)
        fused = torch.randn(batch * new, HEADS.query + 2 * HEADS.kv, HEADS.head_dim, device="cuda").bfloat16()
        self.q, self.k, self.v = fused.split([HEADS.query, HEADS.kv, HEADS.kv], dim=1)
        row = torch.randperm(slots, device="cuda")[: batch * new]
        token = torch.arange(batch * new, device="cuda")
        ring = token // new * cache.windows.ring + token % new
        self.slots = StoreSlots(row, ring, torch.full_like(ring, -1))
        self.words = causal_words(drafts, "cuda").repeat(batch, 1) if drafts else None
        self.tables = tables
        self.workspace = cuda_decode.make_workspace(cache, HEADS.query, batch, drafts)

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
            out = cuda_decode.decode(layer.cache, self.tables, q, HEADS.sm_scale, **rest)
        else:
            out = cuda_decode.verify(layer.cache, self.tables, self.words, q, HEADS.sm_scale, **rest)
        return rotate(out, layer.online.value.reading) if kind == "apart" else out

    def call(self, layer: Layer, kind: str) -> Callable[[], object]:
        return lambda: self.attend(layer, kind).flatten(1) @ layer.projection


def measure(bits: str, batch: int, length: int, drafts: int) -> dict[str, float]:
    """Microseconds of a layer of every kind; how far ``online`` is from ``apart``."""
    layouts, windows = (
        layouts_of(bits, HEADS.kv, HEADS.head_dim),
        replace(WINDOWS, ring=WINDOWS.recent + max(drafts, 1)),
    )
    tables, slots = shuffled_tables([length] * batch, PAGE)
    layers = max(layers_of(read_bytes(batch, length, layouts)), 8)
    made = [Layer(random_cache(slots, batch, layouts, windows, seed), seed) for seed in range(layers)]
    step = Step(batch, length, drafts, slots, tables, made[0].cache)
    # Two roundings to 16 bits lie between them; and a result that differs from run to run is a race.
    wanted, first = (step.attend(made[0], kind).double() for kind in ("apart", "online"))
    distance = float((first - wanted).norm() / wanted.norm())
    assert distance < 4e-3, f"{batch} x {length}: online and apart differ by {distance}"
    for _ in range(20):
        assert torch.equal(step.attend(made[0], "online").double(), first), f"{batch} x {length}: runs differ"
    # In turns, so that all kinds meet the same clocks; the best of each.
    runs = [{kind: time_us([step.call(layer, kind) for layer in made]) for kind in KINDS} for _ in range(3)]
    return {kind: min(run[kind] for run in runs) for kind in KINDS} | {"distance": distance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--bits", default="k3v2", help="widths of keys and values, such as k2v2")
    parser.add_argument("--shapes", default=SHAPES, help="requests x tokens, separated by commas")
    parser.add_argument("--drafts", type=int, default=0, help="new tokens of a request; 0 for decode")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    rows: list[dict[str, object]] = []
    for shape in args.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        found = in_new_process(measure, args.bits, batch, length, args.drafts)
        size = read_bytes(batch, length, layouts_of(args.bits, HEADS.kv, HEADS.head_dim))
        step = (WEIGHT_BYTES + LAYERS * size) / limit / 1e3
        rows.append({
            "batch": batch, "length": length, "drafts": args.drafts, **{f"{kind}_us": found[kind] for kind in KINDS},
            "online_adds_us": found["online"] - found["folded"], "apart_adds_us": found["apart"] - found["folded"],
            "step_ms": step / 1e3, "of_step": LAYERS * (found["online"] - found["folded"]) / step,
            "distance": found["distance"],
        })  # fmt: skip
    report("values", rows, limit, args.json)


if __name__ == "__main__":
    main()
