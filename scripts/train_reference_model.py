"""Train the small Qwen3-style reference model on this machine's Python sources.

    python scripts/train_reference_model.py --out models/mine            # the size that the project ships
    python scripts/train_reference_model.py --out models/strong --preset strong  # 25M parameters, five minutes
    python scripts/train_reference_model.py --out models/hybrid --preset hybrid  # linear and full layers, five minutes
    python scripts/train_reference_model.py --out models/gpt_oss --preset gpt-oss  # sinks and windows, on a CPU core

Needs an NVIDIA GPU, but for the last, torch, safetensors, tokenizers and numpy; minutes. Writes a Hugging Face
folder, its key outliers added (see reference_model/outliers.py), and prints the held-out loss and retrieval accuracy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation")]

from accuracy.measures.retrieval import Retrieval  # noqa: E402
from accuracy.methods.bf16 import Bf16  # noqa: E402
from accuracy.models import Regime, load, outlier_state  # noqa: E402
from reference_model import corpus, evaluate  # noqa: E402
from reference_model.export import build_model, load_tokenizer, save_model  # noqa: E402
from reference_model.gpt_oss import GptOssModel  # noqa: E402
from reference_model.hybrid import HybridModel  # noqa: E402
from reference_model.model import SIZES, ModelConfig, ReferenceModel  # noqa: E402

PRESETS: dict[str, dict[str, object]] = {
    "strong": {
        "size": "strong",
        "stages": "2048:70,4096:30",
        "seconds": 255.0,
        "corpus_mb": 60,
        "lr": 2e-3,
        "workers": 12,
        "outlier_factor": 1.0,
    },
    "hybrid": {
        "stages": "1024:60,4096:40",
        "seconds": 270.0,
        "corpus_mb": 60,
        "lr": 2e-3,
        "workers": 12,
        "outlier_factor": 1.0,
        "no_compile": True,
    },
    "gpt-oss": {
        "stages": "512:70,1024:20,2048:10",
        "seconds": 1500.0,
        "corpus_mb": 30,
        "lr": 1e-3,
        "workers": 0,
        "batch_tokens": 4096,
        "outlier_factor": 1.0,
        "no_compile": True,
        "device": "cpu",
    },
}
"""Options of a preset; those given on the command line win. "strong" is for the accuracy laboratory, which adds its own
outliers; "hybrid" (reference_model/hybrid.py) has linear layers and gets none; "gpt-oss" (reference_model/gpt_oss.py)
starts from the shipped model and keeps its outliers with any factor but 1. Their stages are shares of the time."""
START = ROOT / "models" / "reference"
"""What "gpt-oss" starts from."""

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--preset", choices=[*PRESETS], help="a set of options")
    parser.add_argument(
        "--seconds", type=float, help="train so long, compilation included; the stages' tokens are then shares of it"
    )
    parser.add_argument("--size", choices=[*SIZES], default="medium", help="shape of the model (default: medium)")
    parser.add_argument("--shape", help="instead of --size: layers,hidden,q_heads,kv_heads,ffn")
    parser.add_argument("--seed", type=int, default=1, help="of data order, weights and samples")
    parser.add_argument("--stages", default="2048:180,8192:100,1024:30", help="context:million tokens, in order")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--retrieval", type=float, default=0.4, help="share of retrieval samples")
    parser.add_argument("--corpus-mb", type=int, default=120, help="source text to read")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that build samples")
    parser.add_argument("--work", type=Path, help="folder for tokens and tokenizer, reused if filled (default: OUT)")
    parser.add_argument("--outlier-factor", type=float, default=32, help="key outliers: a power of two, 1 for none")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, which computes in float32")
    parser.add_argument("--prepare-only", action="store_true", help="stop when tokens and tokenizer are written")
    preset = parser.parse_known_args(argv)[0].preset
    if preset:
        parser.set_defaults(**PRESETS[preset])
    return parser.parse_args(argv)


def prepare(
    work: Path, megabytes: int, seed: int, vocab: int, known: Tokenizer | None = None
) -> tuple[Tokenizer, list[str]]:
    """Tokenizer, ``known`` or trained, and names for facts; tokens are in ``work``/tokens.npy afterwards."""
    work.mkdir(parents=True, exist_ok=True)
    words_path = work / "words.json"
    if words_path.exists():
        return load_tokenizer(work), json.loads(words_path.read_text())
    begin = time.time()
    texts = corpus.read_texts(corpus.source_files(seed), megabytes * 1_000_000)
    sample = texts[: max(50, len(texts) // 6)]
    tokenizer = known or corpus.train_tokenizer(sample, vocab)
    tokens = corpus.encode_texts(tokenizer, texts)
    np.save(work / "tokens.npy", tokens)
    tokenizer.save(str(work / "tokenizer.json"), pretty=False)
    words = corpus.training_words(texts)
    words_path.write_text(json.dumps(words))
    size, count = sum(map(len, texts)) / 1e6, len(tokens) / 1e6
    print(f"{len(texts)} files, {size:.0f} MB, {count:.1f}M tokens, {time.time() - begin:.0f} s", flush=True)
    return tokenizer, words


def learning_rate(done: float, peak: float) -> float:
    """Linear warm-up over the first 3%, then a cosine to 3% of the peak. ``done`` in [0, 1]."""
    if done < 0.03:
        return peak * (done / 0.03)
    return peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * (done - 0.03) / 0.97)))


def train(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Tokenizer,
    words: list[str],
    work: Path,
) -> int:
    """Train a model with float32 weights and BF16 arithmetic; returns the tokens it saw.

    Args:
        args: of the command line.
        model: ids [batch, n] -> logits [batch, n, vocab], on the device.
        tokenizer: of the samples.
        words: names for facts.
        work: folder with the tokens of the corpus.
    """
    torch.set_float32_matmul_precision("high")
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")

    def loss_of(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1])
        losses = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        flat = weights[:, 1:].flatten()
        return (losses * flat).sum() / flat.sum() + getattr(model, "apart", 0.0)

    step_loss = loss_of if args.no_compile else torch.compile(loss_of, dynamic=False)
    stages = [(int(n), float(m) * 1e6) for n, m in (stage.split(":") for stage in args.stages.split(","))]
    budget = sum(tokens for _, tokens in stages)
    on_gpu = args.device != "cpu"
    told = 200 if on_gpu else 20
    seen, begin, running, count = 0.0, time.time(), torch.zeros((), device=args.device), 0
    share = 0.0
    for length, tokens in stages:
        share += tokens / budget
        rows = max(1, args.batch_tokens // length)
        samples = corpus.Samples(work / "tokens.npy", tokenizer, words, length, args.seed, args.retrieval)
        loader = corpus.batches(samples, rows, args.workers)
        steps = itertools.count() if args.seconds else range(max(1, round(tokens / (rows * length))))
        for step in steps:
            done = (time.time() - begin) / args.seconds if args.seconds else seen / budget
            if args.seconds and done >= share:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(min(1.0, done), args.lr)
            ids, weights = (x.to(args.device, non_blocking=True) for x in next(loader))
            with sdpa_kernel(BACKENDS, set_priority=True), torch.autocast(args.device, torch.bfloat16, on_gpu):
                loss = step_loss(ids, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen += rows * length
            running, count = running + loss.detach(), count + 1
            if step % told == told - 1:
                mean, running, count = running.item() / count, torch.zeros_like(running), 0
                print(f"{length} {seen / 1e6:6.1f}M loss {mean:.3f} {time.time() - begin:4.0f} s", flush=True)
    model.eval()
    return round(seen)


def recall(model: Any, tokenizer: Tokenizer, length: int, seed: int) -> float:
    """Exact match with a 16-bit cache on 128 questions about documents of ``length`` tokens, facts anywhere."""
    questions = evaluate.retrieval_questions(tokenizer, length, 32, 4, 8, seed, last=0)
    return Retrieval(model, questions, max(1, 65536 // length)).correct(Bf16()).float().mean().item()


def train_other(
    args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer, words: list[str], work: Path
) -> None:
    """Train and save a model of another architecture, and report."""
    torch.manual_seed(args.seed)
    if args.preset == "hybrid":
        trained: HybridModel | GptOssModel = HybridModel(config.vocab, config.max_positions)
    else:
        text = torch.from_numpy(np.load(work / "tokens.npy", mmap_mode="r")[:4096].astype(np.int64))
        trained = GptOssModel(START, config.max_positions, text.view(8, -1))
    trained.to(args.device)
    begin = time.time()
    tokens = train(args, trained, tokenizer, words, work)
    seconds = time.time() - begin
    if isinstance(trained, GptOssModel):
        trained.save(args.out, tokenizer, outliers=args.outlier_factor != 1)
    else:
        trained.save(args.out, tokenizer)
    nll = evaluate.held_out_loss(trained, corpus.held_out_tokens(tokenizer), 2048)
    write_report(args, tokenizer, seconds, tokens, nll, config.max_positions, {})


def lengths_up_to(longest: int) -> list[int]:
    """Lengths of documents that a model is asked about."""
    return [n for n in (512, 1024, 2048, 4096, 8192) if n <= longest]


def write_report(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    seconds: float,
    tokens: int,
    nll: float,
    longest: int,
    own: dict[str, Any],
) -> None:
    """Write and print what training gave: how long, on how many tokens, the loss, what the saved model recalls, and
    facts of ``own``."""
    model, _ = load(args.out, args.device)
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": args.seed,
        "stages": args.stages,
        "train_seconds": round(seconds),
        "tokens": tokens,
        "held_out_nll": round(nll, 3),
        "outlier_factor": 1.0,
        "outlier_pairs": [],
        **own,
        "bf16_retrieval": {n: recall(model, tokenizer, n - 64, seed=1) for n in lengths_up_to(longest)},
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Prepare, train, add outliers, save, report."""
    args = parse_args(argv)
    config = SIZES[args.size]
    if args.shape:
        layers, hidden, heads, kv_heads, ffn = map(int, args.shape.split(","))
        config = ModelConfig(layers, hidden, heads, kv_heads, ffn)
    work = args.work or args.out
    known = load_tokenizer(START) if args.preset == "gpt-oss" else None
    tokenizer, words = prepare(work, args.corpus_mb, args.seed, config.vocab, known)
    if args.prepare_only:
        return
    longest = max(int(stage.split(":")[0]) for stage in args.stages.split(","))
    config = config.replace(max_positions=longest)
    if args.preset in ("hybrid", "gpt-oss"):
        return train_other(args, config, tokenizer, words, work)
    begin = time.time()
    torch.manual_seed(args.seed)
    trained = ReferenceModel(config).to(args.device)
    tokens = train(args, trained, tokenizer, words, work)
    seconds = time.time() - begin
    state = {name: tensor.to(torch.bfloat16) for name, tensor in trained.state_dict().items()}
    plain = build_model(config, state, args.device)
    nll = evaluate.held_out_loss(plain, corpus.held_out_tokens(tokenizer), 2048)
    save_model(args.out, config, state, tokenizer)
    model, _ = load(args.out, args.device)
    state, pairs = outlier_state(model, evaluate.calibration_prompts(tokenizer), Regime("", keys=args.outlier_factor))
    save_model(args.out, config, state, tokenizer)
    own = {"shape": asdict(config), "outlier_factor": args.outlier_factor, "outlier_pairs": pairs}
    write_report(args, tokenizer, seconds, tokens, nll, longest, own)


if __name__ == "__main__":
    main()
