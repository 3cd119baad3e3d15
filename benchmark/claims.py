"""What README and docs claim, and where the results say it; :mod:`check_claims` compares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from accuracy_figures import chart_names, mean_kl
from check_claims import ROOT, Claim

README = "README.md"
BENCHMARKS = "benchmark/README.md"
WHOLE = (README, "docs/decode_kernel.md")
"""Pages whose tables are claimed row by row."""

SERVED = {
    "| BF16 | 16 |": "bf16",
    "| FP8 e4m3 | 8 |": "fp8",
    "| **`focus`, keys 3 bits, values 2 (default)** | 2.78 |": "int2-focus-k3v2",
    "| `focus`, 2 bits | 2.28 |": "int2-focus",
    "| `plus`, 2 bits | 2.28 |": "int2",
    "| OSCAR as published | 2.53 |": "int2-paper-g64",
}
"""Beginning of a row of README's first table -> the cache in the result of ``oscar prove``."""
ACCURACY = {
    "bf16": "BF16",
    "fp8": "FP8 e4m3",
    "fp8-scaled": "FP8 e4m3, scales by layer",
    "int2-focus-3.0": "`focus`, 3.0 by layer",
    "int2-focus-k3v2": "**`focus`, `k3v2` (default)**",
    "int2-focus-2.75": "`focus`, 2.75 by layer",
    "int2-focus-2.5": "`focus`, 2.5 by layer",
    "int2-2.5": "`plus`, 2.5 by layer",
    "int2-focus": "`focus`, `k2v2`",
    "int2": "`plus`, `k2v2`",
    "int2-paper-g64": "OSCAR as published, g64",
    "int2-quarot": "QuaRot, g128",
}
"""The same for the table of docs/accuracy.md, which has all caches."""
LONG = {
    "bf16": "BF16",
    "int2": "**default**",
    "int2-k2v2-codebook-symmetric": "codebook, `k2v2`",
}
"""Cache in the result of the run at long contexts -> row of docs/accuracy.md."""
RECALLED = {
    "bf16": "BF16, 28K",
    "int2": "default, 28K",
    "int2-symmetric": "default, values `symmetric`",
    "int2-3.0": "**`--bits 3.0`**",
    "int2-k4v2": "`k4v2`",
    "int2-k3v3": "`k3v3`",
}
"""The same of the run that asked for more functions of modules of 28,000 tokens."""
PROVED = {
    ("h200_prove_smollm2", "bf16"): "BF16",
    ("h200_prove_smollm2", "fp8"): "FP8",
    ("h200_prove_smollm2", "int2"): "`plus`, `k2v2`",
    ("h200_prove_smollm2", "int2-focus"): "`focus`, `k2v2`",
    ("h200_prove_smollm2_bits", "int2-focus-3.0"): "`focus`, `--bits 3.0`",
    ("h200_prove_smollm2_bits", "int2-focus-3.5"): "`focus`, `--bits 3.5`",
}
"""Result and cache of ``oscar prove`` -> row of the example in docs/prove.md."""
RECIPES = (
    "QuaRot-INT2 g64", "OSCAR g64", "plus g64", "focus g64, served form", "focus g128, served form, --bits k3v2"
)  # fmt: skip
"""Methods of the laboratory whose KL docs/accuracy.md tells of models with windows."""
SHAPES = {"1 x 100K": (1, 100_000), "8 x 32K": (8, 32_768), "32 x 32K": (32, 32_768), "32 x 100K": (32, 100_000)}
LABELS = {shape: label for label, shape in SHAPES.items()}
STORED = {
    "CUDA, decode steps": "cuda_us",
    "rotating values too": "cuda_us_rotating_v",
    "CUDA, prompts, steps from 129 on": "prompt_us",
    "prompts, rotating values too": "prompt_us_rotating_v",
    "Triton": "us",
    "PyTorch's BF16 copy": "bf16_index_copy_us",
}
"""Rows of the store's table in benchmark/README.md -> names in the result."""
ONE = "figure4", 1, 100_000
"""Experiment, requests and tokens of a single request."""
QUICKSTART = {
    "BF16": ("BF16", None),
    "INT2, the default": ("INT2 (focus, k3v2)", 128),
    "INT2, `plus`, 2 bits": ("INT2 (plus, k2v2)", 128),
    "OSCAR INT2, as published": ("OSCAR INT2", 64),
    "the same": ("OSCAR INT2", 128),
    "QuaRot-INT2": ("QuaRot-INT2", 64),
    "naive INT2": ("naive INT2", 64),
}
"""Rows of README's table of the quickstart -> method and group in the result."""
EXTENDED = {
    "8,192 tokens | nothing": (1, 0, 8192),
    "8,192 tokens | 32K": (1, 32_768, 8192),
    "256 tokens | 32K": (1, 32_768, 256),
    "128 tokens | 2K": (1, 2048, 128),
    "16 tokens | 128K": (1, 131_072, 16),
    "eight of 1,024 tokens | nothing": (8, 0, 1024),
    "256 tokens behind each of eight hits | 8K": (8, 8192, 256),
}
"""Rows of benchmark/README.md's table of extends -> requests, cached tokens and new ones of each."""
BF16_KERNELS = "baseline_us", "fa3_us", "xqa_us"
FP8_KERNELS = "flashinfer_fp8_us", "fa3_fp8_us", "xqa_fp8_us"


@cache
def result(name: str) -> Any:
    """A committed result."""
    return json.loads((ROOT / "benchmark" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def served() -> Iterator[Claim]:
    """The real model behind servers."""
    caches = {cache["name"]: cache for cache in result("h200_prove_qwen2.5_coder_1.5b")["caches"]}
    for beginning, name in SERVED.items():
        figures, bits = caches[name]["figures"], caches[name]["bits"]
        files = figures["tasks"]["files"]
        needles = figures["retrieval"]["tasks"]["needle"]["lengths"]["8192"]
        asked = [files.get("gsm8k_test"), files.get("humaneval"), figures["recall"]["all"], needles]
        rates = [rate["right"]["mean"] for rate in asked if rate]
        cells = ["{}" if rate else "-" for rate in asked]
        if name == "bf16":
            kl, shown = [], "-"
        else:
            kl, shown = [figures["tail-kl"]["8192"]["kl"]["mean"]["mean"]], "{}"
        bold = [f"**{cell}**" if "default" in beginning else cell for cell in cells]
        text = " | ".join([beginning.removesuffix(" |"), *bold, shown, "{}"])
        yield Claim(README, f"{text} |", (*rates, *kl, 16 / bits))


def tested(rate: dict[str, Any] | None) -> tuple[str, list[float]]:
    """A cell of a rate, with p where it is not below .001, and its numbers; "-" where there is no rate."""
    if not rate:
        return "-", []
    right, p = rate["right"]["mean"], rate.get("p_value")
    if p is None:
        return "{}", [right]
    return ("{} (<.001)", [right]) if p < 0.001 else ("{} ({})", [right, p])


def accuracy() -> Iterator[Claim]:
    """The table of all caches of the real model: rates, and p where it is not below .001."""
    for row in result("h200_prove_qwen2.5_coder_1.5b")["caches"]:
        label = ACCURACY.get(row["name"])
        if label is None:
            continue
        figures = row["figures"]
        files = figures.get("tasks", {}).get("files", {})
        asked = [files.get(name) for name in ("gsm8k_choose", "gsm8k_test", "humaneval")]
        # A file that was not asked to its end is shown as "-".
        asked = [rate if rate and rate["counts"]["asked"] == rate["questions"] else None for rate in asked]
        asked.append(figures.get("recall", {}).get("all"))
        cells, values = [f"| {label}", "{}"], [row["bits"]]
        for rate in asked:
            cell, numbers = tested(rate)
            cells.append(cell)
            values += numbers
        needles = figures["retrieval"]["tasks"]["needle"]["lengths"].get("8192")
        cells.append("{}")
        values.append(needles["right"]["mean"])
        for length in ("2048", "8192"):
            cells.append("{}")
            values.append(figures["tail-kl"][length]["kl"]["mean"]["mean"])
        yield Claim("docs/accuracy.md", " | ".join(cells) + " |", tuple(values))


def long_contexts() -> Iterator[Claim]:
    """The run at 8K to 30K tokens, what chunks cost, and YaRN."""
    page, run = "docs/accuracy.md", "h200_prove_qwen2.5_coder_1.5b"
    caches = {cache["name"]: cache["figures"] | {"bits": cache["bits"]} for cache in result(f"{run}_long")["caches"]}
    for name, label in LONG.items():
        figures = caches[name]
        values = [figures["bits"], *(figures["tail-kl"][n]["kl"]["mean"]["mean"] for n in ("8192", "16384", "30000"))]
        cells = ["{}"] * 4
        keys = figures["retrieval"]["tasks"]["multi-key"]["lengths"]["30000"]
        for rate in (*figures["recall"]["lengths"].values(), keys, figures["tasks"]["files"]["gsm8k_test"]):
            cell, numbers = tested(rate)
            cells.append(cell)
            values += numbers
        yield Claim(page, f"| {label} | " + " | ".join(cells) + " |", tuple(values))
    for row in result(f"{run}_recall")["caches"]:
        asked = (row["figures"]["recall"]["lengths"]["28000"], row["figures"]["tasks"]["files"]["gsm8k_choose"])
        tests = [tested(rate) for rate in asked]
        text = " | ".join(["| " + RECALLED[row["name"]], "{}", *(cell for cell, _ in tests)])
        yield Claim(page, f"{text} |", (row["bits"], *(number for _, numbers in tests for number in numbers)))
    values = []
    newest = {cache["name"]: cache["figures"] for cache in result(f"{run}_0.5.23")["caches"]}
    for kind, part, name in (
        ("tasks", "files", "gsm8k_test"),
        ("tasks", "files", "humaneval"),
        ("recall", "lengths", "6144"),
    ):
        own, base = (newest[cache][kind][part][name] for cache in ("int2", "bf16"))
        values += [own["right"]["mean"], base["right"]["mean"], own["p_value"]]
    text = "GSM8K of the test split is {} for {} (p {}), HumanEval {} for {} (p {}), recall of 6K {} for {} (p {})"
    far = [newest[name]["recall"]["lengths"]["28000"] for name in ("int2", "bf16", "int2-3.0")]
    values += [far[0]["right"]["mean"], far[1]["right"]["mean"], far[0]["p_value"]]
    code = newest["int2-3.0"]["tasks"]["files"]["humaneval"]
    values += [number for row in (far[2], code) for number in (row["right"]["mean"], row["p_value"])]
    text += ", of 28K {} for {} (p {}). There `--bits 3.0` has {} (p {}), though {} of HumanEval (p {})"
    yield Claim(page, text, tuple(values))
    cold = [caches[f"int2-chunk-{n}"]["effects"]["30000"]["cold_kl"]["mean"] for n in (8192, 2048, 512)]
    cached = caches["int2"]["tail-kl"]["30000"]["kl"]["mean"]["mean"]
    yield Claim(
        page,
        "{} with chunks of 8,192, {} with 2,048 and {} with 512; read again behind its cached prefix {}",
        (*cold, cached),
    )
    yarn = [
        {cache["name"]: cache["figures"] for cache in result(f"{run}_{name}")["caches"]}
        for name in ("yarn", "yarn_fit_32k", "yarn_retrieval")
    ]
    kl = [run["int2"]["tail-kl"][n]["kl"]["mean"]["mean"] for run in yarn[:2] for n in ("64000", "120000")]
    yield Claim(
        page,
        "KL is {} behind 64K and {} behind 120K tokens where the fit covers 131,072 positions, {} and {} where it "
        "covers 32,768",
        tuple(kl),
    )
    found = [yarn[2][name]["retrieval"]["all"]["right"]["mean"] * 36 for name in ("bf16", "int2")]
    yield Claim(page, "Of 36 needles BF16 finds {}, the default {}", tuple(found))


def laboratory() -> Iterator[Claim]:
    """Widths of keys and of values on the real model."""
    (model,) = result("h200_widths_qwen2.5_coder_1.5b")["models"].values()
    rows, names = model["regimes"]["as trained"]["rows"], chart_names("focus g128, served form")
    yield Claim(
        "docs/accuracy.md",
        "A third bit is worth more for keys (KL from {} to {}, laboratory) than for values ({}).",
        tuple(mean_kl(rows[names[widths]]) for widths in ((2, 2), (3, 2), (2, 3))),
    )


def like_gpt_oss() -> Iterator[Claim]:
    """The model of gpt-oss's architecture, without outliers and with."""
    models = result("cpu_accuracy_gpt_oss")["models"]
    rows = [models[name]["regimes"]["as trained"]["rows"] for name in ("gpt_oss", "gpt_oss_x32")]
    yield Claim(
        "docs/accuracy.md",
        "QuaRot {} and {}, OSCAR {} and {}, `plus` {} and {}, `focus` {} and {}, the default {} and {}.",
        tuple(found[name]["language"]["kl"]["mean"] for name in RECIPES for found in rows),
    )


def gemma() -> Iterator[Claim]:
    """A real model with windows."""
    rows = result("cpu_accuracy_gemma3_270m")["models"]["gemma3_270m"]["regimes"]["as trained"]["rows"]
    yield Claim(
        "docs/accuracy.md",
        "KL QuaRot {}, OSCAR {}, `plus` {}, `focus` {}, the default {}, FP8 {} (`cpu_accuracy_gemma3_270m.json`)",
        tuple(rows[name]["language"]["kl"]["mean"] for name in (*RECIPES, "FP8")),
    )


def codebooks() -> Iterator[Claim]:
    """Decoding and storing with points that a layer shares."""
    rows = {(row["batch"], row["length"]): row for row in result("h200_kernels_codings_shared")["decode"][0]["rows"]}
    times = tuple(rows[SHAPES[shape]]["cuda:k2bv2s_us"] for shape in ("1 x 100K", "32 x 32K", "32 x 100K"))
    yield Claim("docs/decode_kernel.md", "{}, {} and {} us at 1 x 100K, 32 x 32K and 32 x 100K", times)
    stored = {(row["heads"], row["bits"], row["tokens"]): row for row in result("h200_kernels_store_shared")["rows"]}
    scalars, points = (stored["32x8x128", bits, 128]["cuda_us"] for bits in ("k2v2", "k2bv2s"))
    yield Claim("docs/decode_kernel.md", "one of 128 {}, with a codebook {}", (scalars, points))
    fewer = stored["12x2x128", "k2bv2s", 128]["cuda_us"] / stored["12x2x128", "k2v2", 128]["cuda_us"]
    ratios = "takes {} times that of scalars at 128 tokens**, {} with two kv heads"
    yield Claim("benchmark/kernels/LOG.md", ratios, (points / scalars, fewer))


def proved() -> Iterator[Claim]:
    """The example of docs/prove.md: all lengths together."""
    rows = {
        (file, cache["name"]): cache
        for file in ("h200_prove_smollm2", "h200_prove_smollm2_bits")
        for cache in result(file)["caches"]
    }
    for (file, name), label in PROVED.items():
        row = rows[file, name]
        tail, right = row["figures"]["tail-kl"]["all"], row["figures"]["retrieval"]["all"]["right"]
        kl = tail["kl"]
        mean = [kl["mean"][key] for key in (("mean",) if name == "bf16" else ("mean", "low", "high"))]
        worst = [kl["p99"]["mean"], kl["p99.9"]["mean"], tail["agreement"]["mean"]]
        shown = "{}" if name == "bf16" else "{} ({} to {})"
        text = f"| {label} | {{}} | {shown} | {{}} | {{}} | {{}} | {{}} ({{}} to {{}}) |"
        yield Claim(
            "docs/prove.md", text, (row["bits"], *mean, *worst, *(right[key] for key in ("mean", "low", "high")))
        )


def kernels() -> Iterator[Claim]:
    """Attention of one layer, the fastest stock kernel of two runs."""
    own, third = (
        {(row["batch"], row["length"]): row for row in result(f"h200_kernels_decode_{name}")["rows"]}
        for name in ("stock", "xqa")
    )
    for label, shape in SHAPES.items():
        bf16, fp8 = (
            min(run[shape][name] for run in (own, third) for name in names if name in run[shape])
            for names in (BF16_KERNELS, FP8_KERNELS)
        )
        three, two = own[shape]["cuda:k3v2_us"], own[shape]["cuda_us"]
        yield Claim(README, f"| {label} | {{}} | {{}} | {{}} | {{}} | {{}} |", (bf16, fp8, three, two, fp8 / three))
    shares = [100 * row["cuda_of_limit"] for row in result("h200_kernels_decode")["rows"]]
    yield Claim(README, "With two bits that is {} to {}% of the speed", (min(shares), max(shares)))
    verify = result("h200_kernels_verify")
    of_limit = [
        100 * share(verify["read_bandwidth_gb_s"], row["batch"], row["length"], row["one"])
        for batch in (1, 8)
        for heads in ("96x8", "48x8")
        for row in verify["rows"]
        if (row["heads"], row["batch"], row["length"]) == (heads, batch, 100_000)
    ]
    yield Claim(
        README,
        "With 96 and 48 query heads it is {} and {}% for one request of 100K, {} and {}% for eight",
        tuple(of_limit),
    )


def decode_kernel() -> Iterator[Claim]:
    """The table of docs/decode_kernel.md: our kernels of one run, the fastest stock kernels of two others."""
    stock = [
        {(row["batch"], row["length"]): row for row in result(f"h200_kernels_decode_{name}")["rows"]}
        for name in ("stock", "xqa")
    ]
    for row in result("h200_kernels_decode")["rows"]:
        shape = row["batch"], row["length"]
        own = [row[name] for name in ("limit_us", "cuda_us", "cuda_of_limit", "cuda:k3v2_us", "triton_us")]
        best = [
            min(run[shape][name] for run in stock for name in names if name in run[shape])
            for names in (BF16_KERNELS, FP8_KERNELS)
        ]
        label = f"{row['batch']} x {row['length'] // 1000 if row['length'] == 100_000 else row['length'] // 1024}K"
        yield Claim("docs/decode_kernel.md", f"| {label} |" + " {} |" * 7, (*own, *best))


def kernel_tables() -> Iterator[Claim]:
    """The tables of benchmark/README.md that are of kernels: decoding on an H100, verification, storing."""
    for row in result("h100_kernels_decode")["rows"]:
        label = LABELS.get((row["batch"], row["length"]))
        if label:
            own = [row[name] for name in ("limit_us", "cuda_us", "cuda_of_limit")]
            best = [min(row[name] for name in names) for names in (BF16_KERNELS, FP8_KERNELS)]
            yield Claim(BENCHMARKS, f"| {label} |" + " {} |" * 5, (*own, *best))
    for row in result("h200_kernels_verify")["rows"]:
        shape = row["heads"], row["batch"], row["length"]
        if shape in (("32x8", 1, 100_000), ("32x8", 8, 100_000), ("96x8", 8, 100_000)) and row["kernel"] == "cuda":
            label = f"| {shape[0].split('x')[0]} | {shape[1]} x 100K |"
            pairs = [row[f"{kind}_{tokens}"] for tokens in (2, 4, 8, 16) for kind in ("verify", "apart")]
            yield Claim(BENCHMARKS, label + " {} |" + " {} ({}) |" * 4, (row["one"], *pairs))
    stored = {row["tokens"]: row for row in result("h200_kernels_store")["rows"]}
    for label, name in STORED.items():
        values = [value for tokens in (1, 32, 128, 512, 8192) if (value := stored[tokens][name]) is not None]
        yield Claim(BENCHMARKS, f"| {label} |" + " {} |" * len(values), tuple(values))


def extends() -> Iterator[Claim]:
    """Chunks of prompts against the faster stock kernel."""
    found = {
        (row["batch"], row["prefix"], row["chunk"]): row["overhead"] for row in result("h200_kernels_extend")["rows"]
    }
    for label, shape in EXTENDED.items():
        how = "less" if found[shape] < 0 else "longer"
        yield Claim(BENCHMARKS, f"| {label} | {{}}% {how} |", (100 * abs(found[shape]),))


def common_tools() -> Iterator[Claim]:
    """The table of docs/measuring.md."""
    caches = result("h200_ecosystem_qwen2.5_coder_1.5b")["results"]
    rows = {
        "32 cold prompts, seconds": lambda cache: cache["cold_32"]["seconds"],
        "milliseconds per token": lambda cache: cache["cold_32"]["mean_tpot_ms"],
        "gsm8k, 5 shots": lambda cache: cache["gsm8k_5_shots"],
        "gsm8k, 64 shots": lambda cache: cache["gsm8k_64_shots"],
    }
    for label, value in rows.items():
        numbers = tuple(value(caches[name]) for name in ("bf16", "fp8", "int2"))
        yield Claim("docs/measuring.md", f"| {label} |" + " {} |" * 3, numbers)


def share(bandwidth: float, batch: int, length: int, us: float) -> float:
    """Part of ``bandwidth`` in GB/s at which two bits of 8 kv heads of 128 channels are read, windows in 16 bits."""
    window, row, exact = 320, 8 * 72, 8 * 128 * 4
    return batch * ((length - window) * row + window * exact) / us / 1e3 / bandwidth


def servers() -> Iterator[Claim]:
    """Whole servers."""
    default, full = (result(f"h200_serving_throughput_{name}_qwen3_8b") for name in ("default", "full"))
    rows = [default[name][0] for name in ("fa3", "xqa_fp8", "int2")]
    yield Claim(
        README,
        "| as many requests of 16K as fit |" + " {} ({}) |" * 4,
        tuple(row[key] for row in (*rows, full["int2"][0]) for key in ("tokens_per_s", "running")),
    )
    speeds = [row["tokens_per_s"] for row in rows]
    yield Claim(
        BENCHMARKS,
        "| tokens per second | {} | - | {} | {} | {} | {} |",
        (*speeds, *(default[f"over_{name}"]["int2"] for name in ("fa3", "xqa_fp8"))),
    )
    paper = result("h200_paper_qwen3_8b")["rows"]
    speed = [
        next(row["U"] for row in paper[name] if (row["experiment"], row["requests"], row["prompt"]) == ONE)
        for name in ("fa3", "fa3_fp8", "int2")
    ]
    yield Claim(README, "| one request behind 100K | {} | {} | - | {} |", tuple(speed))


def quickstart() -> Iterator[Claim]:
    """The table of the quickstart on two CPU cores."""
    rows = {(row["method"], row["group"]): row for row in result("cpu_quickstart")["rows"]}
    for label, key in QUICKSTART.items():
        row, text = rows[key], f"| {label} | {key[1] or '-'} | {{}} | {{}} | {{}} |"
        yield Claim(README, text, (row["bits"], *row["exact"].values()))


def all_claims() -> list[Claim]:
    """Every claim."""
    return [
        claim
        for claims in (
            served,
            accuracy,
            long_contexts,
            laboratory,
            like_gpt_oss,
            gemma,
            codebooks,
            proved,
            kernels,
            decode_kernel,
            kernel_tables,
            extends,
            common_tools,
            servers,
            quickstart,
        )
        for claim in claims()
    ]
