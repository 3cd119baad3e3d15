"""Policy gradient with rollouts of an int2 server: the smallest loop that a trainer can copy.

    python examples/reinforce.py --out result.json     # minutes on a CPU: the shipped model, int2, then BF16 (auto)

The task: recall a number from a document, a digit a token. The shipped model can, so its weights are shaken first, and
training has something to win back. A step: sample answers, reward the share of right digits, weigh each token by its
importance (the trainer's probability over the rollout's, cut at 2), step, send the weights, flush the cache. Weights
are float32 here and BF16 in products and in the server. Needs sglang, transformers and this repository.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from sglang.srt.utils import MultiprocessingSerializer
from transformers import AutoModelForCausalLM, AutoTokenizer

from oscar_cpu.server import environment, has_gpu
from oscar_tools.evaluation.prove.machine import machine
from oscar_tools.local_server import LocalServer, serve

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from reference_model.retrieval import DIGITS, build_document, question  # noqa: E402

MOST_IMPORTANCE = 2.0


@dataclass
class Rollout:
    """Prompt and answer, token ids; log probabilities of the answer as the server sampled it; its reward, 0 to 1."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    reward: float


def shake(model: torch.nn.Module, strength: float) -> None:
    """Add noise to every matrix, ``strength`` times its standard deviation."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.add_(strength * weight.std() * torch.randn(weight.shape, generator=generator))


def ask(server: LocalServer, tokenizer: Any, prompts: int, samples: int, seed: int) -> list[list[Rollout]]:
    """Sampled answers to new questions, a group for each prompt."""
    texts, numbers = [], []
    for number in range(prompts):
        document = build_document(
            lambda text: len(tokenizer.encode(text)), 256, 2, seed * prompts + number, first=64, last=64
        )
        word, digits = next(iter(document.facts.items()))
        texts.append(tokenizer.encode(document.text + question(word)))
        numbers.append(tokenizer.encode(digits))
    sampling = {"temperature": 1.0, "n": samples, "max_new_tokens": DIGITS, "ignore_eos": True}
    body = {"input_ids": texts, "sampling_params": sampling, "return_logprob": True}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=3600)
    reply.raise_for_status()
    groups: list[list[Rollout]] = [[] for _ in texts]
    for at, answer in enumerate(reply.json()):
        group, ids = at // samples, answer["output_ids"]
        right = sum(x == y for x, y in zip(ids, numbers[group], strict=True))
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        groups[group].append(Rollout(texts[group], ids, logprobs, right / DIGITS))
    return groups


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Rollout]]) -> dict[str, float]:
    """One step; how far the rollout's log probabilities are from the trainer's, and how often importance was cut."""
    optimizer.zero_grad()
    count = sum(map(len, groups))
    distances, cut = [], 0
    for group in groups:
        baseline = sum(one.reward for one in group) / len(group)
        ids = torch.tensor([one.prompt + one.answer[:-1] for one in group])
        chosen = torch.tensor([one.answer for one in group])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, logits_to_keep=DIGITS).logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        rolled = torch.tensor([one.logprobs for one in group])
        ratio = (logprobs.detach() - rolled).exp()
        advantage = torch.tensor([[one.reward - baseline] for one in group])
        (-(ratio.clamp(max=MOST_IMPORTANCE) * advantage * logprobs).sum() / (count * DIGITS)).backward()
        distances += (logprobs.detach() - rolled).abs().flatten().tolist()
        cut += int((ratio > MOST_IMPORTANCE).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    distances.sort()
    tokens = len(distances)
    found = {"mean": sum(distances) / tokens, "p99": distances[int(0.99 * (tokens - 1))], "cut": cut / tokens}
    return {name: round(value, 4) for name, value in found.items()}


def send(server: LocalServer, model: torch.nn.Module, version: str) -> None:
    """Send every weight; SGLang flushes its cache. Trainers whose weights are large send buckets of them."""
    weights = [(name, x.detach().bfloat16()) for name, x in model.named_parameters()]
    torch.multiprocessing.set_sharing_strategy("file_system")
    sent = base64.b64encode(MultiprocessingSerializer.serialize(weights)).decode()
    for route, body in (
        ("begin_weight_update", {}),
        ("update_weights_from_tensor", {"serialized_named_tensors": [sent], "weight_version": version}),
        ("end_weight_update", {}),
    ):
        reply = requests.post(f"{server.url}/{route}", json=body, timeout=3600)
        if not reply.json()["success"]:
            raise RuntimeError(reply.text)


def loop(given: argparse.Namespace, dtype: str, folder: Path) -> list[dict[str, float]]:
    """Shake, serve with a cache of this type, and take every step.

    Returns:
        of every step the mean reward, and what :func:`train` says.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    shake(model, given.shake)
    model.bfloat16().save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    model.float()
    optimizer = torch.optim.Adam(model.parameters(), lr=given.rate)
    arguments = ["--kv-cache-dtype", dtype, "--max-total-tokens", "24576", "--random-seed", "0"]
    arguments += [] if dtype == "int2" or has_gpu() else ["--attention-backend", "torch_native"]
    steps = []
    # Documents are short; with these windows most of one is read from quantized rows.
    variables = environment(os.environ | {"SGLANG_MIXED_KV_RECENT_TOKENS": "64"})
    with serve(folder / "start", folder / "server.log", arguments, variables) as server:
        for number in range(given.steps):
            groups = ask(server, tokenizer, given.prompts, given.samples, number)
            reward = sum(one.reward for group in groups for one in group) / (given.prompts * given.samples)
            steps.append({"reward": round(reward, 4)} | train(model, optimizer, groups))
            send(server, model, str(number))
            said = ", ".join(f"{name} {value:.3f}" for name, value in steps[-1].items())
            print(f"{dtype}, step {number}: {said}", flush=True)
    return steps


def main(argv: list[str] | None = None) -> None:
    """Train, and write what every step was: mean reward, the distance of the rollout's log probabilities from the
    trainer's (mean and p99), and the share of tokens whose importance was cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=str(ROOT / "models" / "reference"))
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["int2", "auto"], help="of the rollouts, one by one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--rate", type=float, default=3e-5, help="of Adam")
    parser.add_argument("--shake", type=float, default=0.31, help="noise, in standard deviations of each matrix")
    given = parser.parse_args(argv)
    begin, steps = time.monotonic(), {}
    for dtype in given.kv_cache_dtype:
        with tempfile.TemporaryDirectory() as folder:
            steps[dtype] = loop(given, dtype, Path(folder))
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "model", "kv_cache_dtype")}
    command = shlex.join(["python", "examples/reinforce.py", *(sys.argv[1:] if argv is None else argv)])
    found = machine() | {"command": command, "seconds": round(time.monotonic() - begin), "settings": settings}
    given.out.write_text(json.dumps(found | {"steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
