"""Prompts in FP8: what FlashAttention-3 gains and loses on a long history, whole and cut into pieces.

8,192 queries attend to all of a contiguous history, in BF16 and in FP8 (e4m3) with a factor for each kv head. *Whole*
is one call; *cut* is a call for each piece of keys, merged by log-sum-exp in float32, because tensor cores of Hopper
sum products of FP8 in fewer bits than float32 has. Errors are relative, of 64 rows against float64 of the same inputs,
for queries that attend to everything (diffuse), as most do (typical), to few keys (sharp) and half to a single one
(needle). *Sums* is that of diffuse rows against float64 of the inputs as FP8 has them: what the kernel adds.

    python benchmark/kernels/bench_fp8_prompts.py --json fp8_prompts.json
"""

from __future__ import annotations

import argparse
from functools import cache, partial

import torch

from oscar_tools.bench.report import report
from oscar_tools.bench.timing import read_bandwidth, time_us

Q_HEADS, KV_HEADS, HEAD_DIM, QUERIES = 32, 8, 128, 8192
GQA = Q_HEADS // KV_HEADS
SM_SCALE = HEAD_DIM**-0.5
KINDS = {"diffuse": 0.1, "typical": 1.0, "sharp": 2.5, "needle": 1.0}
"""Of queries, by row number modulo 4, and how large they are."""
CHECKED = 64
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def inputs(keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, bfloat16 [tokens, heads, head_dim]: with wide channels and a mean of values."""
    random = torch.Generator("cuda").manual_seed(keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=random)

    wide = torch.ones(HEAD_DIM, device="cuda")
    wide[::17] = 6
    k = normal(keys, KV_HEADS, HEAD_DIM) * wide
    v = normal(keys, KV_HEADS, HEAD_DIM) + 0.3 * normal(KV_HEADS, HEAD_DIM)
    size = torch.tensor(list(KINDS.values()), device="cuda").repeat(QUERIES // len(KINDS))
    q = normal(QUERIES, Q_HEADS, HEAD_DIM) * size[:, None, None] / wide.sqrt()
    # Logits of a query are normal, so the log-sum-exp of them all is known; a needle's logit is made the same.
    seeker, needle = q[3::4], k[keys // 3].repeat_interleave(GQA, 0)
    rest = torch.tensor(float(keys), device="cuda").log() + (SM_SCALE * seeker * wide).square().sum(-1) / 2
    missing = rest - SM_SCALE * (seeker * needle).sum(-1)
    seeker += (missing / (SM_SCALE * needle.square().sum(-1)))[..., None] * needle
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers and their factors [1, kv_heads], the largest magnitude of a kv head's over FP8's."""
    heads = x.unflatten(1, (KV_HEADS, -1)).float()
    factor = heads.abs().amax((0, 2, 3)) / LARGEST
    return (heads / factor[:, None, None]).to(FP8).flatten(1, 2), factor[None]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a few queries in float64."""
    grouped = q.unflatten(1, (KV_HEADS, GQA)).double()
    found = []
    for head in range(KV_HEADS):
        weights = (SM_SCALE * torch.einsum("qgd,kd->gqk", grouped[:, head], k[:, head].double())).softmax(-1)
        found.append(torch.einsum("gqk,kd->qgd", weights, v[:, head].double()))
    return torch.cat(found, 1)


@cache
def ends_of(tokens: int) -> torch.Tensor:
    """Where the only request begins and ends; made once, before calls are captured."""
    return torch.tensor([0, tokens], dtype=torch.int32, device="cuda")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factors: dict[str, torch.Tensor], piece: int
) -> torch.Tensor:
    """FlashAttention-3 over pieces of the keys, merged in float32; bfloat16 [queries, q_heads, head_dim]."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    parts, sums = [], []
    for some_k, some_v in zip(k.split(piece), v.split(piece), strict=True):
        out, lse, *_ = flash_attn_varlen_func(
            q, some_k, some_v, ends_of(len(q)), ends_of(len(some_k)), len(q), len(some_k),
            softmax_scale=SM_SCALE, causal=False, return_softmax_lse=True, **factors,
        )  # fmt: skip
        parts.append(out)
        sums.append(lse.T)
    if len(parts) == 1:
        return parts[0]
    weights = torch.stack(sums).softmax(0)
    return sum(w[..., None] * part for w, part in zip(weights, parts, strict=True)).bfloat16()


def error(found: torch.Tensor, truth: torch.Tensor, kind: int) -> float:
    """Relative error of the checked rows of a kind."""
    a, b = found[kind :: len(KINDS)].double(), truth[kind :: len(KINDS)]
    return float((a - b).norm() / b.norm())


def measure(keys: int, piece: int) -> list[dict[str, object]]:
    """Rows of BF16 and FP8, whole and cut."""
    plain = inputs(keys)
    casts = {name: to_fp8(x) for name, x in zip("qkv", plain, strict=True)}
    factors = {f"{name}_descale": factor for name, (_, factor) in casts.items()}
    fp8 = casts["q"][0], casts["k"][0], casts["v"][0]
    restored = [
        (x.unflatten(1, (KV_HEADS, -1)).float() * factor[0, :, None, None]).flatten(1, 2)
        for x, factor in casts.values()
    ]
    checked = (
        torch.arange(CHECKED, device="cuda") * (QUERIES // CHECKED) // 4 * 4 + torch.arange(CHECKED, device="cuda") % 4
    )
    truth, of_restored = (exact(q[checked], k, v) for q, k, v in (plain, restored))
    flops = 4 * QUERIES * keys * Q_HEADS * HEAD_DIM
    rows: list[dict[str, object]] = []
    for dtype, tensors, scales in (("bf16", plain, {}), ("fp8", fp8, factors)):
        for form, tokens in (("whole", keys), ("cut", piece)):
            if form == "cut" and keys <= piece:
                continue
            call = partial(attention, *tensors, scales, tokens)
            found = call()[checked]
            us = time_us([call])
            row: dict[str, object] = {"keys": keys, "dtype": dtype, "form": form, "piece": tokens, "us": us}
            row["TFLOP/s"] = flops / us / 1e6
            row |= {kind: error(found, truth, i) for i, kind in enumerate(KINDS)}
            row["sums"] = error(found, of_restored, 0) if dtype == "fp8" else None
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--keys", default="8192,32768,102400", help="lengths of the history, separated by commas")
    parser.add_argument("--piece", type=int, default=4096, help="keys of a piece")
    args = parser.parse_args()
    rows = [row for keys in args.keys.split(",") for row in measure(int(keys), args.piece)]
    report("prompts in FP8", rows, read_bandwidth(), args.json)


if __name__ == "__main__":
    main()
