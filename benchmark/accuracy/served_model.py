"""What a cache costs a real model, served: nats per token behind a cached prefix, and retrieval, over HTTP.

    python benchmark/accuracy/served_model.py --model results/real_model                # BF16, naive, plus, focus
    python benchmark/accuracy/served_model.py --model DIR --cache plus --cache focus --bf16-args '...' --int2-args '...'

Everything is what a user runs: a stock server dumps calibration text, ``oscar fit`` fits each recipe to it, and stock
servers answer. Of every document the first tokens are cached by a first request; the next 256 arrive behind them, and
the server says how likely it finds them. Documents, calibration text and questions never share a file
(:mod:`accuracy.corpus`). Servers run side by side as far as ``--at-once`` allows.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy.corpus import KINDS, Corpus  # noqa: E402
from accuracy.scope import text_windows  # noqa: E402
from oscar_cpu.server import OUR_PREFIXES, environment, has_gpu  # noqa: E402
from oscar_tools.evaluation.intervals import bootstrap, wilson  # noqa: E402
from oscar_tools.evaluation.methods import BARE, K_PATH, RECIPE, V_PATH, files_of  # noqa: E402
from oscar_tools.evaluation.prove.machine import machine  # noqa: E402
from oscar_tools.local_server import LocalServer, serve  # noqa: E402
from reference_model.evaluate import retrieval_questions  # noqa: E402

CACHES = ("bf16", "naive", "plus", "focus")
READ, FACTS, SEED = 256, 8, 61
"""Tokens that are read behind the prefix, numbers hidden in a document of retrieval, seed of these documents."""
BITS = "k2v2"
"""Of both recipes: those of naive INT2."""
CALIBRATION_LENGTH = 1024
"""Tokens of a calibration request."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--cache", action="append", choices=CACHES, help="what to measure; repeatable; default: all")
    parser.add_argument("--group", type=int, default=64, help="channels that share a scale")
    parser.add_argument("--calibration", action="append", choices=KINDS, help="kinds of text; default: all four")
    parser.add_argument("--calibration-tokens", type=int, default=32768)
    parser.add_argument("--context", type=int, help="positions to fit to; 0 are those of the requests (as oscar fit)")
    parser.add_argument("--prefix", type=int, action="append", help="cached tokens (default: 2048, 4096, 7424)")
    parser.add_argument("--documents", type=int, default=32, help="per prefix")
    parser.add_argument("--needle", type=int, action="append", help="tokens of documents (default: 1024, 2048, 4096)")
    parser.add_argument("--questions", type=int, default=50, help="per length")
    parser.add_argument("--bf16-args", default="", help="flags of BF16 servers, quoted as in a shell")
    parser.add_argument("--int2-args", default="", help="flags of int2 servers")
    parser.add_argument("--mem-fraction", type=float, default=0.2, help="--mem-fraction-static of every server")
    parser.add_argument("--at-once", type=int, default=1, help="servers side by side")
    parser.add_argument("--work", type=Path, default=ROOT / "results" / "served_model", help="dump, rotations, logs")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "served_model.json")
    return parser.parse_args(argv)


def clean(extra: dict[str, str]) -> dict[str, str]:
    """The process's environment without settings of earlier experiments; those of this run on top."""
    kept = {"SGLANG_OSCAR_EXTEND_BACKEND"}
    return environment({k: v for k, v in os.environ.items() if k in kept or not k.startswith(OUR_PREFIXES)}) | extra


def generate(server: LocalServer, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
    """One greedy request."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    reply = requests.post(f"{server.url}/generate", json=body | extra, timeout=600)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def flags(args: argparse.Namespace, cache: str) -> list[str]:
    """Server flags of a cache."""
    longest = max([*args.prefix, *args.needle]) + 1024
    common = ["--mem-fraction-static", str(args.mem_fraction), "--random-seed", "0", "--chunked-prefill-size", "8192"]
    common += ["--max-total-tokens", str(max(65536, 4 * longest)), "--max-running-requests", "16"]
    if cache == "bf16":
        plain = [] if has_gpu() or "--attention-backend" in args.bf16_args else ["--attention-backend", "torch_native"]
        return [*common, *plain, *shlex.split(args.bf16_args)]
    return [*common, "--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(args.group),
            *shlex.split(args.int2_args)]  # fmt: skip


def calibrate(args: argparse.Namespace, corpus: Corpus) -> None:
    """Dump calibration text from a stock server and fit every recipe that is asked for; what is there is kept."""
    recipes = [cache for cache in args.cache if cache in ("plus", "focus")]
    if all(list((args.work / recipe).glob("*.safetensors")) for recipe in recipes):
        return
    count = max(1, args.calibration_tokens // CALIBRATION_LENGTH // len(args.calibration))
    kinds = [text_windows(corpus.tokens(k, "train"), (0, None), count, CALIBRATION_LENGTH) for k in args.calibration]
    prompts = corpus.begun(torch.stack(kinds, 1).flatten(0, 1)).tolist()
    dump = args.work / "qkv_dumps"
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_DIR": str(dump.resolve()),
           "DUMP_KVCACHE_TOKENS": str(sum(map(len, prompts)))}  # fmt: skip
    # Prefixes that prompts share must not be cached: what is not computed is not recorded.
    with serve(
        args.model, args.work / "dump.log", [*flags(args, "bf16"), "--disable-radix-cache"], clean(env)
    ) as server:
        for ids in prompts:
            generate(server, ids, 1)
    for recipe in recipes:
        begin = time.time()
        command = [sys.executable, "-m", "oscar_rotation", "fit", str(dump), "--out", str(args.work / recipe)]
        if args.context is not None:
            command += ["--context", str(args.context)]
        subprocess.run([*command, "--recipe", recipe, "--bits", BITS, "--model", str(args.model)], check=True)
        print(f"fitted {recipe} in {time.time() - begin:.0f} s", flush=True)


def variables(args: argparse.Namespace, cache: str) -> dict[str, str]:
    """Variables that serve a cache; naive INT2 has neither rotations nor windows nor clipping."""
    if cache == "bf16":
        return {}
    if cache == "naive":
        return dict.fromkeys((K_PATH, V_PATH), "identity") | BARE
    return files_of(args.work / cache) | {RECIPE: cache}


def nats(server: LocalServer, documents: list[list[int]], prefix: int, cache: str) -> list[float]:
    """Nats per token of the tokens behind a cached prefix, by document.

    Raises:
        RuntimeError: an int2 server did not take most of the prefix from its cache. What a stock server computes again,
            as it does where a hybrid model has kept no state, it reads in 16 bits all the same.
    """
    losses = []
    for ids in documents:
        generate(server, ids[:prefix], 1)
        meta = generate(server, ids, 1, return_logprob=True, logprob_start_len=prefix)["meta_info"]
        # int2 servers compute the recent window anew, see docs/design.md.
        if cache != "bf16" and meta["cached_tokens"] < prefix - 600:
            raise RuntimeError(f"{cache}: {meta['cached_tokens']} of {prefix} tokens came from the cache")
        scored = [entry[0] for entry in meta["input_token_logprobs"]][-(len(ids) - prefix - 1) :]
        losses.append(-sum(scored) / len(scored))
    return losses


def recalled(server: LocalServer, questions: Any) -> list[bool]:
    """Whether the greedy answer is right, by question."""
    right = []
    for prompt, answer in zip(questions.prompts.tolist(), questions.answers.tolist(), strict=True):
        generate(server, prompt[: questions.document_tokens], 1)
        right.append(generate(server, prompt, len(answer))["output_ids"] == answer)
    return right


def measure(args: argparse.Namespace, cache: str, corpus: Corpus) -> dict[str, Any]:
    """Serve one cache and ask everything."""
    begin = time.time()
    out: dict[str, Any] = {"nats": {}, "right": {}}
    env = clean(variables(args, cache))
    with serve(args.model, args.work / f"{cache}.log", flags(args, cache), env) as server:
        out["start_s"] = round(time.time() - begin, 1)
        for prefix in args.prefix:
            # Documents begin alike: a hybrid model goes on from the last state that a shorter one has left.
            server.flush()
            share = -(-args.documents // len(KINDS))
            texts = [text_windows(corpus.tokens(k, "report"), (0, None), share, prefix + READ) for k in KINDS]
            documents = corpus.begun(torch.cat(texts)[: args.documents]).tolist()
            out["nats"][str(prefix)] = nats(server, documents, prefix, cache)
        for length in args.needle:
            per = 2
            asked = retrieval_questions(corpus.backend, length, -(-args.questions // per), per, FACTS, SEED,
                                        lines=corpus.lines("report"))  # fmt: skip
            asked = replace(asked, prompts=corpus.begun(asked.prompts))
            out["right"][str(length)] = recalled(server, asked)[: args.questions]
    out["seconds"] = round(time.time() - begin, 1)
    print(f"{cache}: {out['seconds']} s, {out['start_s']} s of them to start", flush=True)
    return out


def table(results: dict[str, Any]) -> str:
    """Excess over BF16 in nats per token and questions answered, with 95% intervals."""
    lines = []
    for cache, row in results["rows"].items():
        cells = [cache]
        for prefix, own in row["nats"].items():
            base = results["rows"].get("bf16", {}).get("nats", {}).get(prefix)
            if base is None:
                cells.append(f"{prefix}: {sum(own) / len(own):.4f} nats")
                continue
            x = bootstrap([a - b for a, b in zip(own, base, strict=True)])
            cells.append(f"{prefix}: {x.mean:+.4f} ({x.low:.4f} to {x.high:.4f})")
        for length, right in row["right"].items():
            x = wilson(sum(right), len(right))
            cells.append(f"needle {length}: {x.mean:.2f} ({x.low:.2f} to {x.high:.2f})")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Calibrate, measure every cache, save."""
    args = parse_args(argv)
    args.cache = args.cache or list(CACHES)
    args.calibration = args.calibration or list(KINDS)
    args.prefix, args.needle = args.prefix or [2048, 4096, 7424], args.needle or [1024, 2048, 4096]
    args.work.mkdir(parents=True, exist_ok=True)
    corpus, begin = Corpus(AutoTokenizer.from_pretrained(args.model)), time.time()
    for kind in KINDS:  # Before threads share it.
        corpus.tokens(kind, "report")
    calibrate(args, corpus)
    results: dict[str, Any] = {
        "model": args.model.resolve().name,
        **machine(),
        "command": shlex.join(["python", "benchmark/accuracy/served_model.py", *(argv or sys.argv[1:])]),
        "group": args.group,
        "calibration": {"kinds": args.calibration, "tokens": args.calibration_tokens},
        "documents": args.documents,
        "questions": args.questions,
        "rows": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        for cache, future in [(cache, pool.submit(measure, args, cache, corpus)) for cache in args.cache]:
            results["rows"][cache] = future.result()
            results["seconds"] = round(time.time() - begin)
            args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
