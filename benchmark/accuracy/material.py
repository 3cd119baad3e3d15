"""What a model is calibrated on and asked: tokens, for the shipped models and for a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from accuracy import scope
from accuracy.corpus import KINDS, Corpus, texts_of
from reference_model.corpus import held_out_tokens
from reference_model.evaluate import Questions, calibration_prompts, retrieval_questions

PROMPTS, PROMPT, FACTS, CALIBRATION_SEED = 8, 1024, 8, 977
"""Calibration: sequences, their tokens, numbers hidden in a document, seed of the documents."""

SEQUENCES = {"mixed": 2, "broad": PROMPTS, "large": 4 * PROMPTS}
"""Of each kind of text and of prompts, in calibration on all of them."""

HELD_OUT_TOKENS = 150_000
"""Tokens of the report's source text that belong to the standard library's held-out modules."""


class Material(Protocol):
    """Tokens of one model.

    Attributes:
        kinds: of text that language is measured on; the first is what tables are sorted by.
        domains: of calibration.
    """

    kinds: tuple[str, ...]
    domains: tuple[str, ...]

    def calibration(self, domain: str) -> torch.Tensor:
        """Calibration sequences: int64 [sequences, n]."""

    def text(self, kind: str, count: int, length: int) -> torch.Tensor:
        """Contexts to measure language on: int64 [count, length]."""

    def questions(self, length: int, documents: int, questions: int) -> Questions:
        """Retrieval questions about documents of ``length`` tokens."""


class ShippedMaterial:
    """For models that scripts/train_reference_model.py trained: source text they have not seen.

    Args:
        tokenizer: of transformers.
        split: "report" or "choice".
    """

    kinds = ("source",)
    domains = ("retrieval", "text")

    def __init__(self, tokenizer: Any, split: str) -> None:
        self.backend, self.split = tokenizer.backend_tokenizer, scope.SPLITS[split]

    def calibration(self, domain: str) -> torch.Tensor:
        """Retrieval prompts, or source text of their shape."""
        prompts = calibration_prompts(self.backend, PROMPTS)
        if domain == "retrieval":
            return prompts
        return scope.text_windows(held_out_tokens(self.backend), scope.CALIBRATION_TEXT, *prompts.shape)

    def text(self, kind: str, count: int, length: int) -> torch.Tensor:
        """Windows of the split's held-out text."""
        return scope.text_windows(held_out_tokens(self.backend), self.split.text, count, length)

    def questions(self, length: int, documents: int, questions: int) -> Questions:
        """Documents of the held-out modules."""
        return retrieval_questions(self.backend, length, documents, questions, FACTS, self.split.seed)


class RealMaterial:
    """For any other model: four kinds of text whose parts never mix (:mod:`accuracy.corpus`).

    Every sequence begins as the model's tokenizer begins a text (:meth:`accuracy.corpus.Corpus.begun`).

    Args:
        tokenizer: of transformers.
        split: "report" or "choice", the part that is measured on; calibration is always on "train".
        more: files of further text for calibration on all kinds (:func:`accuracy.corpus.texts_of`).
    """

    kinds = KINDS
    domains = ("retrieval", "text", *KINDS, *SEQUENCES)

    def __init__(self, tokenizer: Any, split: str, more: Sequence[Path] = ()) -> None:
        self.corpus = Corpus(tokenizer)
        self.more = [self.corpus.encoded(texts_of(path, self.corpus.render)) for path in more]
        self.part = {"report": "report", "choice": "choose"}[split]
        self.seed = scope.SPLITS[split].seed

    def calibration(self, domain: str) -> torch.Tensor:
        """Retrieval prompts, text of one kind ("text" is source), or sequences of each of the five, and of each further
        file: "mixed" has two of each, "broad" eight, as many tokens as a dump has by default, "large" 32."""
        return self.corpus.begun(self._calibration(domain))

    def _calibration(self, domain: str) -> torch.Tensor:
        prompts = self._prompts(max(PROMPTS, SEQUENCES.get(domain, 0)))
        if domain == "retrieval":
            return prompts
        if domain in SEQUENCES:
            count = SEQUENCES[domain]
            kinds = [self._windows(kind, count, prompts.shape[1]) for kind in KINDS]
            kinds += [scope.text_windows(tokens, (0, None), count, prompts.shape[1]) for tokens in self.more]
            # One of each and then one of each again: what is held out at the end has its like before it.
            return torch.stack([prompts[:count], *kinds], 1).flatten(0, 1)
        return self._windows("source" if domain == "text" else domain, *prompts.shape)

    @cache  # noqa: B019 (one object per run)
    def _prompts(self, count: int) -> torch.Tensor:
        lines = self.corpus.lines("train")
        backend = self.corpus.backend
        return retrieval_questions(backend, PROMPT, count, 1, FACTS, CALIBRATION_SEED, lines=lines).prompts

    def _windows(self, kind: str, count: int, length: int) -> torch.Tensor:
        return scope.text_windows(self.corpus.tokens(kind, "train"), (0, None), count, length)

    def text(self, kind: str, count: int, length: int) -> torch.Tensor:
        """Windows of the part that is measured on; of the held-out modules the same as for the shipped models."""
        tokens, span = self.corpus.tokens(kind, self.part), (0, None)
        if kind == "source" and self.part == "report":
            tokens, span = tokens[:HELD_OUT_TOKENS], scope.SPLITS["report"].text
        return self.corpus.begun(scope.text_windows(tokens, span, count, length))

    def questions(self, length: int, documents: int, questions: int) -> Questions:
        """Documents of the part's source files."""
        lines = None if self.part == "report" else self.corpus.lines(self.part)
        backend = self.corpus.backend
        found = retrieval_questions(backend, length, documents, questions, FACTS, self.seed, lines=lines)
        return replace(found, prompts=self.corpus.begun(found.prompts))
