"""Text of four kinds that every machine with the pinned environment has, in three parts that never share a document.

* ``source``: Python files of the standard library;
* ``docs``: Python's language reference, as the standard library's ``help()`` holds it;
* ``chat``: questions about functions and classes of the standard library and their docstrings as answers, behind the
  model's own chat template;
* ``descriptions``: what the installed packages say about themselves, in the order of their names.

Of every document (a file, a topic, a package) its name decides in which part it is: methods are calibrated on
``train``, chosen on ``choose`` and reported on ``report``. The standard library's held-out modules, which the shipped
models were not trained on, are always ``report``. A docstring is in the part of its file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from reference_model.retrieval import HELD_OUT

KINDS = ("source", "docs", "chat", "descriptions")
PARTS = ("train", "choose", "report")
SHARES = (6, 8, 10)
"""Of ten documents the first six are for training, the next two for choosing, the rest for the report."""

LONGEST_FILE, SHORTEST_ANSWER, LONGEST_ANSWER = 200_000, 200, 3000
"""Bytes of a source file, characters of a docstring."""

TURNS = 6
"""Questions of a conversation at most."""

Render = Callable[[list[dict[str, str]]], str]
"""Messages -> the text that a chat model reads."""


def part_of(name: str) -> str:
    """The part of the corpus that a document belongs to."""
    if name in HELD_OUT:
        return "report"
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    return PARTS[next(i for i, end in enumerate(SHARES) if place < end)]


@cache
def library_files() -> dict[str, str]:
    """Python files of the standard library, without its tests and tables of characters: path below the library -> text.

    The held-out modules come first, in their own order; the others by the hash of their names, so that neighbours in
    a text have nothing to do with each other.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
    names = (str(path.relative_to(root)) for path in root.rglob("*.py") if not foreign & set(path.parts))
    ordered = sorted(set(names) - set(HELD_OUT), key=lambda name: hashlib.sha256(name.encode()).digest())
    found = {}
    for name in [*(name for name in HELD_OUT if (root / name).is_file()), *ordered]:
        data = (root / name).read_bytes()
        if 200 < len(data) < LONGEST_FILE:
            try:
                found[name] = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
    return found


def source_texts(part: str, render: Render) -> Iterator[str]:
    """Files of the standard library."""
    yield from (text for name, text in library_files().items() if part_of(name) == part)


def docs_texts(part: str, render: Render) -> Iterator[str]:
    """Topics of the language reference. Some hold others: a paragraph belongs to the first topic that has it."""
    seen: set[str] = set()
    for name in sorted(topics):
        own = [paragraph for paragraph in topics[name].strip().split("\n\n") if paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in own)
        if own and part_of(name) == part:
            yield "\n\n".join(own) + "\n"


def chat_texts(part: str, render: Render) -> Iterator[str]:
    """Conversations of at most :data:`TURNS` questions, each about one file."""
    for name, text in library_files().items():
        if part_of(name) != part:
            continue
        messages: list[dict[str, str]] = []
        for what, answer in docstrings(text):
            if len(messages) == 2 * TURNS:
                break
            messages.append({"role": "user", "content": f"What does {what} in Python's {name} do?"})
            messages.append({"role": "assistant", "content": answer})
        if messages:
            yield render(messages)


def docstrings(text: str) -> Iterator[tuple[str, str]]:
    """Names and docstrings of a module's functions, classes and methods that have one of some length."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            answer = inspect.cleandoc(ast.get_docstring(node) or "")
            if SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER:
                kind = "the class" if isinstance(node, ast.ClassDef) else "the function"
                yield f"{kind} `{node.name}`", answer


def description_texts(part: str, render: Render) -> Iterator[str]:
    """Long descriptions of installed packages, no text twice."""
    found = {}
    for package in importlib.metadata.distributions():
        facts: Any = package.metadata
        body = facts.get_payload() if facts else None
        if body and facts["Name"] and len(body) > SHORTEST_ANSWER:
            found[facts["Name"].lower().replace("_", "-")] = f"{body.strip()}\n"
    seen = set()
    for name in sorted(found):
        if part_of(f"package {name}") == part and found[name] not in seen:
            seen.add(found[name])
            yield found[name]


TEXTS: dict[str, Callable[[str, Render], Iterator[str]]] = {
    "source": source_texts,
    "docs": docs_texts,
    "chat": chat_texts,
    "descriptions": description_texts,
}


def plain_chat(messages: list[dict[str, str]]) -> str:
    """A conversation for a model without a chat template."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)


def renderer(tokenizer: Any) -> Render:
    """The chat template of a transformers tokenizer, or :func:`plain_chat`."""
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False)


class Corpus:
    """Tokens of every kind and part.

    Args:
        tokenizer: of transformers, with a fast tokenizer behind it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.backend, self.render = tokenizer.backend_tokenizer, renderer(tokenizer)
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
            ids: list[int] = []
            for text in TEXTS[kind](part, self.render):
                ids += self.backend.encode(text, add_special_tokens=False).ids
                if self.end is not None:
                    ids.append(self.end)
                if len(ids) >= limit:
                    break
            if not ids:
                raise ValueError(f"this machine has no text of kind {kind!r} for the part {part!r}")
            self.known[kind, part] = np.array(ids[:limit], dtype=np.int64)
        return self.known[kind, part]

    def lines(self, part: str) -> tuple[str, ...]:
        """Lines of source files, for documents that questions are asked about."""
        texts = TEXTS["source"](part, self.render)
        return tuple(line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n"))
