"""Verification of drafts: several new tokens per request in one call.

    python benchmark/kernels/bench_verify.py --kernels cuda,triton --heads 32x8,96x8,48x8

Heads are query heads x kv heads x head_dim, 128 where left out: those of Qwen3-8B, GLM-4.7 and MiniMax-M2.

Times of one layer beside those of decoding one token, and of the same tokens as requests of their own.
"""

from __future__ import annotations

import argparse

import torch
from bench_decode import KERNELS, in_new_process
from harness import (
    PAGE,
    Heads,
    Layouts,
    layers_of,
    layouts_of,
    random_cache,
    read_bandwidth,
    report,
    shuffled_tables,
    time_us,
)

from oscar_kernels.cache import BatchTables, Windows
from oscar_kernels.visible import causal_words

SHAPES = [(1, 100_000), (8, 16_384), (8, 100_000)]
TOKENS = [2, 4, 8, 16]
WINDOWS = Windows(64, 256, 256 + max(TOKENS))


def repeated(tables: BatchTables, tokens: int) -> BatchTables:
    """Every request ``tokens`` times, as if its new tokens were requests."""
    names = ("page_table", "kv_lens", "ring_row", "ring_start", "sink_block")
    return BatchTables(tables.page_size, *(getattr(tables, name).repeat_interleave(tokens, 0) for name in names))


def row_bytes(layouts: Layouts) -> int:
    """Bytes that a token takes in a layer."""
    return sum(layout.row_bytes for layout in layouts)


def measure(kernel: str, heads: Heads, batch: int, length: int) -> dict[str, float]:
    """Microseconds of one layer: ``one`` token, ``verify_n`` for n tokens, ``apart_n`` for n tokens as requests."""
    module, layouts = KERNELS[kernel], layouts_of("k2v2", heads.kv, heads.head_dim)
    layers = layers_of(batch * length * row_bytes(layouts))
    tables, slots = shuffled_tables([length] * batch, PAGE)
    caches = [random_cache(slots, batch, layouts, WINDOWS, seed) for seed in range(layers)]

    def queries(tokens: int) -> torch.Tensor:
        return torch.randn(batch * tokens, heads.query, heads.head_dim, device="cuda").bfloat16()

    def one_by_one(tokens: int) -> float:
        q, several = queries(tokens), repeated(tables, tokens)
        out, space = torch.empty_like(q), workspace(batch * tokens, 0)
        return time_us([lambda c=cache: module.decode(c, several, q, heads.sm_scale, out, space) for cache in caches])

    def together(tokens: int) -> float:
        q, words = queries(tokens), causal_words(tokens, "cuda").repeat(batch, 1)
        out, space = torch.empty_like(q), workspace(batch, tokens)
        return time_us(
            [lambda c=cache: module.verify(c, tables, words, q, heads.sm_scale, out, space) for cache in caches]
        )

    def workspace(requests: int, drafts: int) -> torch.Tensor:
        if kernel == "cuda":
            return module.make_workspace(caches[0], heads.query, requests, drafts)
        return torch.empty(module.workspace_numel(caches[0], heads.query, requests, drafts=drafts), device="cuda")

    times = {"one": one_by_one(1)}
    times |= {f"verify_{tokens}": together(tokens) for tokens in TOKENS}
    return times | {f"apart_{tokens}": one_by_one(tokens) for tokens in TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas")
    parser.add_argument("--heads", default="32x8", help="query heads x kv heads x head_dim, separated by commas")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    rows: list[dict[str, object]] = []
    for kernel in args.kernels.split(","):
        for heads in args.heads.split(","):
            for batch, length in SHAPES:
                times = in_new_process(measure, kernel, Heads.parse(heads), batch, length)
                rows.append({"kernel": kernel, "heads": heads, "batch": batch, "length": length, **times})
    report("verify", rows, limit, args.json)


if __name__ == "__main__":
    main()
