"""Held-out prompts that acceptance is measured on: questions about long documents, and their free continuation."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer

from reference_model.retrieval import build_document, question

FACTS = 4
"""Facts in a document, none of them in the 16-bit windows of a server."""
KINDS = ("question", "continuation")


class Prompt(NamedTuple):
    """A prompt: tokens of its document, the document's number, its kind, ids, and the right answer of a question."""

    length: int
    document: int
    kind: str
    ids: list[int]
    answer: list[int]


def held_out_prompts(
    tokenizer: Tokenizer, lengths: list[int], documents: int, questions: int = 2, seed: int = 7
) -> list[Prompt]:
    """Prompts of all lengths; the first of a document is the document itself, which is to be continued.

    Args:
        tokenizer: of the model.
        lengths: tokens of a document.
        documents: of every length.
        questions: about every document, at most :data:`FACTS`.
        seed: of the documents.

    Raises:
        ValueError: the facts do not fit into a document outside the windows.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompts = []
    for number, length in enumerate(length for length in lengths for _ in range(documents)):
        document = build_document(lambda text: len(encode(text)), length, FACTS, seed * 10_007 + number)
        prompts.append(Prompt(length, number, "continuation", encode(document.text), []))
        for word, answer in list(document.facts.items())[:questions]:
            ids = encode(document.text + question(word))
            prompts.append(Prompt(length, number, "question", ids, encode(answer)))
    return prompts
