"""Text of four kinds (:mod:`oscar_tools.calibration.local_text`) in three parts that never share a document.

Of every document (a file, a topic, a package) its name decides in which part it is: methods are calibrated on
``train``, chosen on ``choose`` and reported on ``report``. The standard library's held-out modules, which the shipped
models were not trained on, are always ``report``. A docstring is in the part of its file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oscar_tools.calibration import local_text
from oscar_tools.calibration.local_text import Render, plain_chat, renderer
from reference_model.retrieval import HELD_OUT

__all__ = ["KINDS", "PARTS", "TEXTS", "Corpus", "part_of", "plain_chat", "python_sources"]

KINDS = ("source", "docs", "chat", "descriptions")
PARTS = ("train", "choose", "report")
SHARES = (6, 8, 10)
"""Of ten documents the first six are for training, the next two for choosing, the rest for the report."""


def part_of(name: str) -> str:
    """The part of the corpus that a document belongs to."""
    if name in HELD_OUT:
        return "report"
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    return PARTS[next(i for i, end in enumerate(SHARES) if place < end)]


def python_sources() -> dict[str, str]:
    """Files of the standard library, the held-out modules first, in their own order."""
    return local_text.python_sources(HELD_OUT)


def source_texts(part: str, render: Render) -> Iterator[str]:
    """Files of the standard library."""
    yield from (text for name, text in python_sources().items() if part_of(name) == part)


def docs_texts(part: str, render: Render) -> Iterator[str]:
    """Topics of the language reference."""
    yield from (text for name, text in local_text.reference_topics() if part_of(name) == part)


def chat_texts(part: str, render: Render) -> Iterator[str]:
    """Conversations, each about one file."""
    files = {name: text for name, text in python_sources().items() if part_of(name) == part}
    yield from (text for _, text in local_text.conversations(files, render))


def description_texts(part: str, render: Render) -> Iterator[str]:
    """Long descriptions of installed packages, no text twice."""
    seen = set()
    for name, text in local_text.package_descriptions():
        if part_of(f"package {name}") == part and text not in seen:
            seen.add(text)
            yield text


TEXTS: dict[str, Callable[[str, Render], Iterator[str]]] = {
    "source": source_texts,
    "docs": docs_texts,
    "chat": chat_texts,
    "descriptions": description_texts,
}


def texts_of(path: Path, render: Render) -> Iterator[str]:
    """Texts of a JSON Lines file, .gz or not: lines with "text", "messages", or "question" and "answer".

    Raises:
        SystemExit: a line is none of these.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if "question" in row and "answer" in row:
                asked = {"role": "user", "content": row["question"]}
                row = {"messages": [asked, {"role": "assistant", "content": row["answer"]}]}
            if "messages" in row:
                yield render(row["messages"])
            elif "text" in row:
                yield row["text"]
            else:
                raise SystemExit(f"error: {path}:{number}: a line needs text, messages, or question and answer")


class Corpus:
    """Tokens of every kind and part.

    Args:
        tokenizer: of transformers, with a fast tokenizer behind it.

    Attributes:
        front: token ids that the model expects in front of every text, as Gemma a begin-of-text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend, self.render = tokenizer.backend_tokenizer, renderer(tokenizer)
        self.front = local_text.leading(tokenizer)
        end = self.backend.token_to_id("<|endoftext|>")
        self.end = tokenizer.eos_token_id if end is None else end
        self.known: dict[tuple[str, str], np.ndarray] = {}

    def tokens(self, kind: str, part: str, limit: int = 200_000) -> np.ndarray:
        """int64 [<= limit]: documents one after the other, each with an end-of-text token behind it.

        Raises:
            ValueError: a kind or part that does not exist, or one without text on this machine.
        """
        if kind not in TEXTS or part not in PARTS:
            raise ValueError(f"there is no text of kind {kind!r}, part {part!r}; kinds: {KINDS}, parts: {PARTS}")
        if (kind, part) not in self.known:
            found = self.encoded(TEXTS[kind](part, self.render), limit)
            if not len(found):
                raise ValueError(f"this machine has no text of kind {kind!r} for the part {part!r}")
            self.known[kind, part] = found
        return self.known[kind, part]

    def encoded(self, texts: Iterable[str], limit: int = 200_000) -> np.ndarray:
        """int64 [<= limit]: texts one after the other, each with an end-of-text token behind it."""
        ids: list[int] = []
        for text in texts:
            ids += self.backend.encode(text, add_special_tokens=False).ids
            if self.end is not None:
                ids.append(self.end)
            if len(ids) >= limit:
                break
        return np.array(ids[:limit], dtype=np.int64)

    def begun(self, ids: torch.Tensor) -> torch.Tensor:
        """Sequences as the model expects them, int64 [count, n]: what it wants in front takes the place of their first
        tokens."""
        front = torch.tensor(self.front, dtype=ids.dtype).expand(len(ids), -1)
        return torch.cat([front, ids[:, len(self.front) :]], 1)

    def lines(self, part: str) -> tuple[str, ...]:
        """Lines of source files, for documents that questions are asked about."""
        texts = TEXTS["source"](part, self.render)
        return tuple(line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n"))
