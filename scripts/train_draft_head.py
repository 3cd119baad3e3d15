"""Train a draft head for a small model, for speculative decoding in SGLang (``--speculative-algorithm EAGLE``).

    python scripts/train_draft_head.py --model models/reference --out results/draft_head              # one GPU, 90 s
    python scripts/train_draft_head.py --model models/reference --out DIR --device cpu --seconds 600  # two cores

The model is one that ``scripts/train_reference_model.py`` made; the head sees the same kind of text, with the model's
hidden states and distributions as what is to be guessed. Besides config and weights the folder gets training.json: how
many tokens a step would give where the model goes on with held-out text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

from draft_head.model import DraftHead  # noqa: E402

from reference_model import corpus  # noqa: E402
from reference_model.export import build_model, load_state, load_tokenizer  # noqa: E402
from reference_model.model import ReferenceModel  # noqa: E402

FEATURE_WEIGHT = 1.0
"""Of the distance between hidden states beside the divergence of distributions."""
LENGTH = 1024
"""Tokens of a sample."""
HELD_OUT, PROMPT, CHOICES = 32, 512, 64
"""Prompts of held-out text to measure on, tokens of each, and tokens that the model chooses behind it."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "reference", help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--seconds", type=float, default=90.0, help="train so long")
    parser.add_argument("--drafts", type=int, default=3, help="tokens that are drafted in a row")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--corpus-mb", type=int, default=30, help="source text to read")
    parser.add_argument("--workers", type=int, default=4, help="processes that build samples")
    parser.add_argument("--seed", type=int, default=1, help="of data order and weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def guesses(
    head: DraftHead, hidden: torch.Tensor, embedded: torch.Tensor, drafts: int
) -> list[tuple[torch.Tensor, slice]]:
    """Hidden states guessed by the model's own and by guesses, and which of the model's each is a guess of.

    Args:
        head: to ask.
        hidden: of the model, float [batch, n, hidden].
        embedded: embeddings of the tokens, likewise.
        drafts: how many in a row.

    Returns:
        for every draft: [batch, n - 1, hidden] whose row t is meant for position t + 1, and the rows that are: those
        whose own guesses begin behind the first tokens.
    """
    n = hidden.shape[1]
    features, passes, out = hidden[:, : n - 1], [], []
    for draft in range(drafts):
        passes.append(head.entries(features, embedded[:, 1:]))
        guess = head(passes)
        out.append((guess, slice(draft, n - 1)))
        # Row t of the next pass is made of the guess for position t, which is row t - 1.
        features = torch.cat([hidden[:, :1], guess[:, :-1]], 1)
    return out


def loss_of(head: DraftHead, target: ReferenceModel, ids: torch.Tensor, drafts: int) -> torch.Tensor:
    """Divergence of the guessed distributions from the model's, and distance of hidden states.

    Args:
        head: to train.
        target: the model, frozen.
        ids: tokens, [batch, n].
        drafts: tokens in a row.
    """
    embedding = target.model.embed_tokens.weight
    with torch.no_grad():
        hidden = target.model(ids)
        wanted = functional.linear(hidden, embedding).float().softmax(-1)
    total = torch.zeros((), device=ids.device)
    for guess, rows in guesses(head, hidden, target.model.embed_tokens(ids), drafts):
        logits = functional.linear(guess[:, rows], embedding).float()
        aim = slice(rows.start + 1, rows.stop + 1)
        divergence = -(wanted[:, aim] * logits.log_softmax(-1)).sum(-1).mean()
        distance = functional.smooth_l1_loss(guess[:, rows].float(), hidden[:, aim].float())
        total = total + divergence + FEATURE_WEIGHT * distance
    return total / drafts


@torch.no_grad()
def greedy(target: ReferenceModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens [batch, n] with ``count`` of the model's own choices behind them."""
    for _ in range(count):
        last = functional.linear(target.model(ids)[:, -1], target.model.embed_tokens.weight)
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
    return ids


@torch.no_grad()
def tokens_a_step(head: DraftHead, target: ReferenceModel, ids: torch.Tensor, drafts: int, prompt: int) -> float:
    """Tokens that a step of verification gives on average.

    Args:
        head: what drafts.
        target: the model.
        ids: prompts with the model's own choices behind them, [batch, n].
        drafts: tokens in a row. A draft counts as long as those before it were right.
        prompt: tokens of a prompt.
    """
    embedding = target.model.embed_tokens.weight
    hidden, starts = target.model(ids), slice(prompt - 1, ids.shape[1] - 1 - drafts)
    right = torch.ones_like(ids[:, starts], dtype=torch.bool)
    total = torch.ones((), device=ids.device)
    for draft, (guess, _) in enumerate(guesses(head, hidden, target.model.embed_tokens(ids), drafts)):
        # Row t is a guess of hidden state t + 1, which chooses token t + 2.
        good = functional.linear(guess[:, :-1], embedding).argmax(-1) == ids[:, 2:]
        right &= good[:, starts.start + draft : starts.stop + draft]
        total += right.float().mean()
    return total.item()


def main(argv: list[str] | None = None) -> None:
    """Train, save, report."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config, state = load_state(args.model)
    target = build_model(config, state, args.device, torch.float32).requires_grad_(False)
    tokenizer = load_tokenizer(args.model)
    texts = corpus.read_texts(corpus.source_files(args.seed), args.corpus_mb * 1_000_000)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = args.out / "tokens.npy"
    np.save(tokens, corpus.encode_texts(tokenizer, texts))
    samples = corpus.Samples(tokens, tokenizer, corpus.training_words(texts), LENGTH, args.seed, 0.4)
    loader = corpus.batches(samples, max(1, args.batch_tokens // LENGTH), args.workers)
    head = DraftHead(config).to(args.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    begin, steps = time.time(), 0
    while (done := (time.time() - begin) / args.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, done / 0.03, (1.0 - done) / 0.5 + 0.02)
        ids = next(loader)[0].to(args.device)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = loss_of(head, target, ids, args.drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if steps % 50 == 0:
            print(f"step {steps} loss {loss.item():.3f} {time.time() - begin:.0f} s", flush=True)
        steps += 1
    tokens.unlink()
    head.eval().save(args.out)
    prompts = torch.from_numpy(corpus.held_out_tokens(tokenizer)[: HELD_OUT * PROMPT]).view(-1, PROMPT).to(args.device)
    told = greedy(target, prompts, CHOICES)
    found = tokens_a_step(head, target, told, args.drafts, PROMPT)
    report = {"model": args.model.name, "seed": args.seed, "seconds": round(time.time() - begin), "steps": steps,
              "tokens": steps * args.batch_tokens, "parameters": sum(p.numel() for p in head.parameters()),
              "drafts": args.drafts, "held_out_tokens_a_step": round(found, 3)}  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
