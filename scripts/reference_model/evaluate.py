"""Held-out loss and retrieval accuracy of the model, with exact and with simulated INT2 caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from reference_model.model import ReferenceModel
from reference_model.retrieval import DIGITS, WORDS, build_document, question
from reference_model.simulate import BF16, Recipe, greedy

REGIMES = ("one chunk", "prefix hit", "uncapped hit")
"""Where a prompt meets quantized history. One chunk: only in decoding. Prefix hit: the document is cached, and its
last 256 tokens are computed again together with the question, as the server does by default. Uncapped hit: only the
question is computed."""

PAGE, RECENT = 64, 256


def equal_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words with the most common token count, so that questions have one length and make a batch."""
    lengths = {word: len(tokenizer.encode(" " + word, add_special_tokens=False).ids) for word in WORDS}
    common = Counter(lengths.values()).most_common(1)[0][0]
    return tuple(word for word, length in lengths.items() if length == common)


def prompts_and_answers(
    tokenizer: Tokenizer, length: int, documents: int, questions: int, facts: int, seed: int, last: int = RECENT
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Retrieval prompts of one length; no fact in the last ``last`` tokens of a document.

    Returns:
        prompts int64 [documents * questions, n], answers int64 [same, DIGITS], document tokens in each prompt.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    words = equal_words(tokenizer)
    built = [
        build_document(lambda t: len(encode(t)), length, facts, seed * 100_003 + i, 128, last, words)
        for i in range(documents)
    ]
    texts = [encode(document.text) for document in built]
    # Documents differ by a few tokens; a batch wants them equal, and their first lines hold no fact.
    shortest = min(map(len, texts))
    prompts, answers = [], []
    for document, ids in zip(built, texts, strict=True):
        for word, number in list(document.facts.items())[:: max(1, facts // questions)][:questions]:
            prompts.append(ids[len(ids) - shortest :] + encode(question(word)))
            answers.append(encode(number))
    return torch.tensor(prompts), torch.tensor(answers), shortest


def calibration_prompts(tokenizer: Tokenizer) -> torch.Tensor:
    """Eight prompts of about 1K tokens that no evaluation uses: int64 [8, n]."""
    return prompts_and_answers(tokenizer, 1024, 8, 1, 8, seed=977)[0]


def prefix_length(regime: str, prompt: int, document: int) -> int:
    """Tokens of a prompt that come from the prefix cache."""
    if regime == "one chunk":
        return 0
    return (prompt - RECENT if regime == "prefix hit" else document) // PAGE * PAGE


def retrieval(
    model: ReferenceModel,
    recipe: Recipe,
    prompts: torch.Tensor,
    answers: torch.Tensor,
    prefix: int,
    batch: int,
) -> float:
    """Share of prompts whose DIGITS greedy tokens are all right."""
    device = next(model.parameters()).device
    right = 0
    for begin in range(0, len(prompts), batch):
        chunk = prompts[begin : begin + batch].to(device)
        out = greedy(model, recipe, chunk, DIGITS, prefix).cpu()
        right += int((out == answers[begin : begin + batch]).all(1).sum())
    return right / len(prompts)


def retrieval_by_length(
    model: ReferenceModel, tokenizer: Tokenizer, lengths: Sequence[int], documents: int, seed: int
) -> dict[int, float]:
    """BF16 retrieval for each document length, 4 questions to a document."""
    found = {}
    for length in lengths:
        prompts, answers, _ = prompts_and_answers(tokenizer, length, documents, 4, 8, seed, last=0)
        found[length] = retrieval(model, BF16, prompts, answers, 0, max(1, 65536 // length))
    return found


@torch.no_grad()
def held_out_loss(model: ReferenceModel, tokens: np.ndarray, length: int) -> float:
    """Mean negative log-likelihood in nats per token over windows of ``length``."""
    device = next(model.parameters()).device
    losses = []
    for begin in range(0, len(tokens) - length - 1, length):
        ids = torch.from_numpy(tokens[begin : begin + length + 1]).to(device)
        logits = model(ids[None, :-1])[0].float()
        losses.append(functional.cross_entropy(logits, ids[1:]).item())
    return float(np.mean(losses))
