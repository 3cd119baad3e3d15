"""Training: the head learns the target's next-token distribution, also where it goes on from its own output."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from draft_head.head import DraftHead
from draft_head.target import Target
from reference_model import corpus

DECAY = 0.8
"""Weight of a step of a chain relative to the one before: a draft counts only where all before it are right."""


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        seconds: how long; the learning rate follows the clock.
        updates: how many updates instead, which gives the same head every time.
        lengths: tokens of a text, one length after the other.
        batch_tokens: tokens of an update.
        steps: drafts of a chain.
        lr: peak learning rate.
        retrieval: share of texts with facts and questions.
        workers: processes that build texts.
        seed: of weights and texts.
    """

    seconds: float = 300.0
    updates: int | None = None
    lengths: tuple[int, ...] = (1024, 4096)
    batch_tokens: int = 16384
    steps: int = 3
    lr: float = 2e-3
    retrieval: float = 0.5
    workers: int = 0
    seed: int = 1


def prepare(work: Path, tokenizer: Tokenizer, megabytes: float, seed: int) -> list[str]:
    """Write tokens of this machine's Python sources to ``work``/tokens.npy unless they are there.

    Returns:
        names for facts; none is one that held-out questions ask for.
    """
    words = work / "words.json"
    if not words.exists():
        work.mkdir(parents=True, exist_ok=True)
        texts = corpus.read_texts(corpus.source_files(seed), int(megabytes * 1e6))
        np.save(work / "tokens.npy", corpus.encode_texts(tokenizer, texts))
        words.write_text(json.dumps(corpus.training_words(texts)))
    return json.loads(words.read_text())


def chain_loss(head: DraftHead, target: Target, ids: torch.Tensor, weights: torch.Tensor, steps: int) -> torch.Tensor:
    """Cross-entropy of a head's distributions to the target's, all steps of all chains.

    Args:
        head: in training.
        target: frozen.
        ids: int64 [batch, n].
        weights: float32 [batch, n], how much predicting a token counts.
        steps: drafts of a chain.
    """
    handed = target.read(ids)
    count = ids.shape[1] - steps
    total = torch.zeros((), device=ids.device)
    share = 0.0
    for step, logits in enumerate(head(handed.embeddings, handed.features, steps)):
        # What the target makes of token t + 1 + step is the distribution of the token behind it.
        wanted = handed.logits[:, step + 1 : step + 1 + count].softmax(-1)
        losses = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), reduction="none")
        # The last chain's last draft is of the token behind the text, whose weight nobody knows.
        counts = functional.pad(weights[:, step + 2 : step + 2 + count], (0, 1), value=1.0)[:, :count].flatten()
        total = total + DECAY**step * (losses * counts).sum() / counts.sum().clamp_min(1.0)
        share += DECAY**step
    return total / share


def rate(done: float, peak: float) -> float:
    """Learning rate: linear warm-up over the first 5%, then a cosine to nothing. ``done`` in [0, 1]."""
    return peak * min(done / 0.05, 0.5 * (1 + float(np.cos(np.pi * done))))


def texts(
    plan: Plan, folder: Path, tokenizer: Tokenizer, words: list[str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of ids and weights, all lengths in turn."""
    loaders = [
        corpus.batches(
            corpus.Samples(folder / "tokens.npy", tokenizer, words, length - 1, plan.seed, plan.retrieval),
            max(1, plan.batch_tokens // length),
            plan.workers,
        )
        for length in plan.lengths
    ]
    for loader in itertools.cycle(loaders):
        yield next(loader)


def train(head: DraftHead, target: Target, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], plan: Plan) -> dict:
    """Train a head in place, in float32.

    Args:
        head: on the target's device.
        target: frozen.
        batches: of :func:`texts`.
        plan: how.

    Returns:
        updates, tokens, seconds, and the loss at the beginning and at the end.
    """
    torch.set_float32_matmul_precision("high")
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01)
    begin, tokens, losses = time.time(), 0, []
    for update in itertools.count():
        done = update / plan.updates if plan.updates else (time.time() - begin) / plan.seconds
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(max(done, 1e-3), plan.lr)
        ids, weights = (x.to(target.device, non_blocking=True) for x in next(batches))
        loss = chain_loss(head, target, ids, weights, plan.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += ids.numel()
        losses.append(loss.detach())
        if update % 100 == 99:
            mean = torch.stack(losses[-100:]).mean().item()
            print(f"{update + 1} updates, {tokens / 1e6:.2f}M tokens, loss {mean:.3f}, {done:.0%}", flush=True)
    head.eval()
    edge = max(1, min(100, len(losses) // 4))
    means = [torch.stack(part).mean().item() for part in (losses[:edge], losses[-edge:])]
    seconds = round(time.time() - begin)
    return {"updates": len(losses), "tokens": tokens, "train_seconds": seconds, "loss": [round(x, 3) for x in means]}
