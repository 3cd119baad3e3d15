"""Retrieval questions as batches of tokens, and the held-out loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from reference_model.retrieval import WORDS, build_document, question

RECENT = 256


@dataclass(frozen=True)
class Questions:
    """Retrieval prompts of one length.

    Attributes:
        prompts: int64 [questions, n], document and question.
        answers: int64 [questions, answer tokens].
        document_tokens: tokens of the document in each prompt.
        depths: float32 [questions], where in the document the fact is, 0 to 1.
        documents: int64 [questions], number of the document, for confidence intervals.
    """

    prompts: torch.Tensor
    answers: torch.Tensor
    document_tokens: int
    depths: torch.Tensor
    documents: torch.Tensor


def equal_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words with the most common token count, so that questions have one length and make a batch."""
    lengths = {word: len(tokenizer.encode(" " + word, add_special_tokens=False).ids) for word in WORDS}
    common = Counter(lengths.values()).most_common(1)[0][0]
    return tuple(word for word, length in lengths.items() if length == common)


def retrieval_questions(
    tokenizer: Tokenizer,
    length: int,
    documents: int,
    questions: int,
    facts: int,
    seed: int,
    last: int = RECENT,
    lines: Sequence[str] | None = None,
) -> Questions:
    """Retrieval questions about documents of ``length`` tokens; no fact in the last ``last`` tokens of a document.
    Documents are made of ``lines``, by default those that :func:`reference_model.retrieval.build_document` takes.

    Raises:
        ValueError: the tokenizer gives answers of different lengths (it must keep every digit apart).
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    words = equal_words(tokenizer)
    built = [
        build_document(lambda t: len(encode(t)), length, facts, seed * 100_003 + i, 128, last, words, lines)
        for i in range(documents)
    ]
    texts = [encode(document.text) for document in built]
    # Documents differ by a few tokens; a batch wants them equal, and their first lines hold no fact.
    shortest = min(map(len, texts))
    prompts, answers, depths, numbers = [], [], [], []
    for number, (document, ids) in enumerate(zip(built, texts, strict=True)):
        chosen = list(document.facts.items())[:: max(1, facts // questions)][:questions]
        for word, answer in chosen:
            prompts.append(ids[len(ids) - shortest :] + encode(question(word)))
            answers.append(encode(answer))
            depths.append(document.text.index(f" {word} is {answer}") / len(document.text))
            numbers.append(number)
    if len({len(answer) for answer in answers}) != 1 or len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("questions or answers differ in length: the tokenizer does not keep digits apart")
    return Questions(
        torch.tensor(prompts), torch.tensor(answers), shortest, torch.tensor(depths), torch.tensor(numbers)
    )


def calibration_prompts(tokenizer: Tokenizer, documents: int = 8) -> torch.Tensor:
    """Prompts of about 1K tokens that no evaluation uses: int64 [documents, n]."""
    return retrieval_questions(tokenizer, 1024, documents, 1, 8, seed=977).prompts


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: np.ndarray, length: int) -> float:
    """Mean negative log-likelihood in nats per token over windows of ``length``."""
    device = next(model.parameters()).device
    losses = []
    for begin in range(0, len(tokens) - length - 1, length):
        ids = torch.from_numpy(tokens[begin : begin + length + 1]).to(device)
        logits = model(ids[None, :-1])[0].float()
        losses.append(functional.cross_entropy(logits, ids[1:]).item())
    return float(np.mean(losses))
