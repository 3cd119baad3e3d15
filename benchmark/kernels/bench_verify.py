"""Verification of drafts: several new tokens per request in one call, Qwen3-8B heads (32 query heads, 8 kv heads, 128).

    python benchmark/kernels/bench_verify.py --kernels cuda,triton

Times of one layer beside those of decoding one token, and of the same tokens as requests of their own.
"""

from __future__ import annotations

import argparse

import torch
from bench_decode import HEAD_DIM, KERNELS, KV_HEADS, PAGE, Q_HEADS, SM_SCALE, in_new_process, layers_of, read_bytes
from harness import layouts_of, random_cache, read_bandwidth, report, shuffled_tables, time_us

from oscar_kernels.cache import BatchTables, Windows
from oscar_kernels.visible import causal_words

SHAPES = [(1, 100_000), (8, 16_384), (8, 100_000)]
TOKENS = [2, 4, 8, 16]
WINDOWS = Windows(64, 256, 256 + max(TOKENS))


def repeated(tables: BatchTables, tokens: int) -> BatchTables:
    """Every request ``tokens`` times, as if its new tokens were requests."""
    names = ("page_table", "kv_lens", "ring_row", "ring_start", "sink_block")
    return BatchTables(tables.page_size, *(getattr(tables, name).repeat_interleave(tokens, 0) for name in names))


def measure(kernel: str, batch: int, length: int) -> dict[str, float]:
    """Microseconds of one layer: ``one`` token, ``verify_n`` for n tokens, ``apart_n`` for n tokens as requests."""
    module, layouts = KERNELS[kernel], layouts_of("k2v2", KV_HEADS, HEAD_DIM)
    layers = layers_of(read_bytes(batch, length, layouts))
    tables, slots = shuffled_tables([length] * batch, PAGE)
    caches = [random_cache(slots, batch, layouts, WINDOWS, seed) for seed in range(layers)]

    def queries(tokens: int) -> torch.Tensor:
        return torch.randn(batch * tokens, Q_HEADS, HEAD_DIM, device="cuda").bfloat16()

    def one_by_one(tokens: int) -> float:
        q, several = queries(tokens), repeated(tables, tokens)
        out, space = torch.empty_like(q), workspace(batch * tokens, 0)
        return time_us([lambda c=cache: module.decode(c, several, q, SM_SCALE, out, space) for cache in caches])

    def together(tokens: int) -> float:
        q, words = queries(tokens), causal_words(tokens, "cuda").repeat(batch, 1)
        out, space = torch.empty_like(q), workspace(batch, tokens)
        return time_us([lambda c=cache: module.verify(c, tables, words, q, SM_SCALE, out, space) for cache in caches])

    def workspace(requests: int, drafts: int) -> torch.Tensor:
        if kernel == "cuda":
            return module.make_workspace(caches[0], Q_HEADS, requests, drafts)
        return torch.empty(module.workspace_numel(caches[0], Q_HEADS, requests, drafts=drafts), device="cuda")

    times = {"one": one_by_one(1)}
    times |= {f"verify_{tokens}": together(tokens) for tokens in TOKENS}
    return times | {f"apart_{tokens}": one_by_one(tokens) for tokens in TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--kernels", default="cuda,triton", help="separated by commas")
    args = parser.parse_args()
    limit = in_new_process(read_bandwidth)
    rows: list[dict[str, object]] = []
    for kernel in args.kernels.split(","):
        for batch, length in SHAPES:
            times = in_new_process(measure, kernel, batch, length)
            rows.append({"kernel": kernel, "batch": batch, "length": length, **times})
    report("verify", rows, limit, args.json)


if __name__ == "__main__":
    main()
