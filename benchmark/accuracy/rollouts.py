"""How far a trainer's rollouts are from the policy that it trains: log probabilities by cache, against BF16.

    python benchmark/accuracy/rollouts.py --model DIR --prompts gsm8k.jsonl --int2 default=ROTATIONS --fp8

Every cache's server samples answers at temperature 1 and says how likely each token was; a BF16 server then reads
prompt and answer at once, as a trainer does, and says how likely it finds them. BF16 answers, read again the same way,
show what arithmetic alone does. Answers have a fixed length, the end token does not end them, so that most of what is
read lies in the quantized part. Prompts are JSON Lines with ``question``, ROTATIONS a folder that ``oscar fit`` has
filled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from oscar_cpu.server import environment, has_gpu  # noqa: E402
from oscar_tools.evaluation.methods import files_of  # noqa: E402
from oscar_tools.evaluation.prove.machine import machine  # noqa: E402
from oscar_tools.evaluation.server_facts import ask  # noqa: E402
from oscar_tools.local_server import LocalServer, serve  # noqa: E402

BF16, FP8 = "bf16", "fp8"
WINDOWS = 64 + 256
"""Tokens of a request that are never read from the quantized part: sink and recent window."""
LOWER, UPPER, CAP = 0.8, 1.28, 2.0
"""Of importance ratios: what clipped objectives leave untouched (DAPO's bounds), and where truncated importance
sampling cuts."""


@dataclass(frozen=True)
class Rollout:
    """A sampled answer.

    Attributes:
        prompt, answer: token ids.
        logprobs: of the answer's tokens, nats, as the server that sampled them says.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines with question; .gz is read, too")
    parser.add_argument("--int2", action="append", default=[], metavar="NAME=FOLDER", help="rotations; repeatable")
    parser.add_argument("--fp8", action="store_true", help="also FP8 as SGLang serves it")
    parser.add_argument("--count", type=int, default=128, help="answers of every cache")
    parser.add_argument("--tokens", type=int, default=2048, help="of an answer")
    parser.add_argument("--server-args", default="", help="flags of every server, quoted as in a shell")
    parser.add_argument("--logs", type=Path, default=ROOT / "results", help="folder for the servers' logs")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "rollouts.json", help="result")
    return parser.parse_args(argv)


def server_of(args: argparse.Namespace, cache: str) -> tuple[list[str], dict[str, str]]:
    """Flags and variables of a cache's server."""
    flags = [*shlex.split(args.server_args), "--random-seed", "0"]
    stock = [] if has_gpu() else ["--attention-backend", "torch_native"]
    if cache == BF16:
        return [*flags, *stock], environment()
    if cache == FP8:
        return [*flags, *stock, "--kv-cache-dtype", "fp8_e4m3"], environment()
    folder = Path(dict(folder.split("=", 1) for folder in args.int2)[cache])
    return [*flags, "--kv-cache-dtype", "int2"], environment() | files_of(folder)


def post(server: LocalServer, body: dict[str, Any]) -> dict[str, Any]:
    """One request to /generate; what the server says of it.

    Raises:
        requests.HTTPError: the server refused.
    """
    reply = requests.post(f"{server.url}/generate", json=body, timeout=1800)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()["meta_info"]
    return found


def sampled(server: LocalServer, prompt: list[int], tokens: int) -> Rollout:
    """An answer of so many tokens."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    found = post(server, {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
    logprobs, ids, *_ = zip(*found["output_token_logprobs"], strict=True)
    return Rollout(prompt, list(ids), list(logprobs))


def read_again(server: LocalServer, rollout: Rollout) -> list[float]:
    """Log probabilities of the answer's tokens, read at once behind its prompt."""
    start = len(rollout.prompt)
    found = post(server, {
        "input_ids": rollout.prompt + rollout.answer, "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True, "logprob_start_len": start - 1,
    })  # fmt: skip
    logprobs = [logprob for logprob, *_ in found["input_token_logprobs"]]
    return logprobs[-len(rollout.answer) :]


def numbers(rollouts: list[Rollout], again: list[list[float]]) -> dict[str, float]:
    """What a trainer watches.

    Args:
        rollouts: of one cache.
        again: log probabilities of their tokens by the policy in BF16.

    Returns:
        ``mean``, ``p99``: of absolute differences, nats per token; ``kl``: of the policy that sampled to the one that
        is trained, nats per token (the estimator ``r - 1 - log r``); ``outside``: share of importance ratios beyond
        [LOWER, UPPER]; ``above``: beyond CAP; ``mean_behind``, ``kl_behind``: the same behind the first WINDOWS tokens
        of a request, where something is read from the quantized part.
    """
    log_ratio = np.concatenate([np.array(b) - np.array(x.logprobs) for x, b in zip(rollouts, again, strict=True)])
    position = np.concatenate([len(x.prompt) + np.arange(len(x.answer)) for x in rollouts])
    ratio = np.exp(log_ratio)
    kl, behind = ratio - 1 - log_ratio, position >= WINDOWS
    return {
        "tokens": len(ratio), "mean": float(np.abs(log_ratio).mean()),
        "p99": float(np.quantile(np.abs(log_ratio), 0.99)), "kl": float(kl.mean()),
        "outside": float(((ratio < LOWER) | (ratio > UPPER)).mean()), "above": float((ratio > CAP).mean()),
        "mean_behind": float(np.abs(log_ratio[behind]).mean()) if behind.any() else math.nan,
        "kl_behind": float(kl[behind].mean()) if behind.any() else math.nan,
    }  # fmt: skip


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """The first questions, in the model's chat template.

    Raises:
        SystemExit: there are fewer.
    """
    opened = gzip.open if args.prompts.suffix == ".gz" else open
    with opened(args.prompts, "rt", encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines][: args.count]
    if len(questions) < args.count:
        raise SystemExit(f"error: {args.prompts} has {len(questions)} questions, {args.count} are asked for")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    chats = ([{"role": "user", "content": question}] for question in questions)
    return [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=True)["input_ids"] for x in chats]


def main() -> None:
    """Measure and print."""
    args = parse_args()
    prompts = prompts_of(args)
    caches = [BF16, *([FP8] if args.fp8 else []), *(name.partition("=")[0] for name in args.int2)]
    result: dict[str, Any] = {
        "benchmark": "rollouts against BF16", "command": shlex.join(["python", *sys.argv]), "machine": machine(),
        "model": args.model.name, "answers": args.count, "tokens": args.tokens, "bounds": [LOWER, UPPER, CAP],
        "rows": [],
    }  # fmt: skip
    args.logs.mkdir(parents=True, exist_ok=True)
    flags, env = server_of(args, BF16)
    with serve(args.model, args.logs / "policy.log", flags, env) as policy, ThreadPoolExecutor(args.count) as pool:
        for cache in caches:
            flags, env = server_of(args, cache)
            with serve(args.model, args.logs / f"rollouts_{cache}.log", flags, env) as server:
                facts = ask(server.url).to_json()
                rollouts = list(pool.map(lambda ids, to=server: sampled(to, ids, args.tokens), prompts))
            row = {"cache": cache, **numbers(rollouts, list(pool.map(lambda x: read_again(policy, x), rollouts)))}
            result["rows"].append(row | {"server": facts})
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(" ".join(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
