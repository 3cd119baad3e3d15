"""Text of four kinds that every machine with SGLang has, so that nothing needs to be downloaded.

* ``source``: Python files of the standard library;
* ``docs``: Python's language reference, as the standard library's ``help()`` holds it;
* ``chat``: questions about functions and classes of the standard library and their docstrings as answers, behind the
  model's own chat template;
* ``descriptions``: what the installed packages say about themselves, in the order of their names.

Every function yields (name of the document, its text). A conversation has the name of the file that it is about.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from oscar_tools.calibration.data import render_chat

Messages = list[dict[str, str]]
Render = Callable[[Messages], str]
"""Messages -> the text that a chat model reads."""
Documents = Iterator[tuple[str, str]]

LONGEST_FILE, SHORTEST_ANSWER, LONGEST_ANSWER = 200_000, 200, 3000
"""Bytes of a source file, characters of a docstring."""
TURNS = 6
"""Questions of a conversation at most."""


@cache
def python_sources(first: Sequence[str] = ()) -> dict[str, str]:
    """Python files of the standard library, without its tests and tables of characters, no text twice: path below the
    library -> text.

    Args:
        first: files that come first, in this order; the others follow by the hash of their names, so that neighbours
            in a text have nothing to do with each other.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
    names = (str(path.relative_to(root)) for path in root.rglob("*.py") if not foreign & set(path.parts))
    ordered = sorted(set(names) - set(first), key=lambda name: hashlib.sha256(name.encode()).digest())
    found, seen = {}, set()
    for name in [*(name for name in first if (root / name).is_file()), *ordered]:
        data = (root / name).read_bytes()
        if 200 < len(data) < LONGEST_FILE and data not in seen:
            seen.add(data)
            try:
                found[name] = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
    return found


def reference_topics() -> Documents:
    """Topics of the language reference. Some hold others: a paragraph belongs to the first topic that has it."""
    seen: set[str] = set()
    for name in sorted(topics):
        own = [paragraph for paragraph in topics[name].strip().split("\n\n") if paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in own)
        if own:
            yield name, "\n\n".join(own) + "\n"


def conversations(files: dict[str, str], render: Render) -> Documents:
    """Conversations of at most :data:`TURNS` questions, each about one of ``files`` (name -> text)."""
    for name, text in files.items():
        messages: Messages = []
        for what, answer in docstrings(text):
            if len(messages) == 2 * TURNS:
                break
            messages.append({"role": "user", "content": f"What does {what} in Python's {name} do?"})
            messages.append({"role": "assistant", "content": answer})
        if messages:
            yield name, render(messages)


@cache
def docstrings(text: str) -> tuple[tuple[str, str], ...]:
    """Names and docstrings of a module's functions, classes and methods that have one of some length."""
    try:
        return tuple(_docstrings(ast.parse(text)))
    except SyntaxError:
        return ()


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            answer = inspect.cleandoc(ast.get_docstring(node) or "")
            if SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER:
                kind = "the class" if isinstance(node, ast.ClassDef) else "the function"
                yield f"{kind} `{node.name}`", answer


def package_descriptions() -> Documents:
    """Long descriptions of installed packages, by name."""
    found = {}
    for package in importlib.metadata.distributions():
        facts: Any = package.metadata
        body = facts.get_payload() if facts else None
        if body and facts["Name"] and len(body) > SHORTEST_ANSWER:
            found[facts["Name"].lower().replace("_", "-")] = f"{body.strip()}\n"
    yield from sorted(found.items())


def plain_chat(messages: Messages) -> str:
    """A conversation for a model without a chat template."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)


def renderer(tokenizer: Any) -> Render:
    """The chat template of a transformers tokenizer, or :func:`plain_chat`; a conversation that it does not take is a
    :class:`~oscar_tools.calibration.errors.DataError`."""
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat
    return lambda messages: render_chat(tokenizer, messages)


def leading(tokenizer: Any) -> list[int]:
    """Token ids that a model expects in front of every text, such as a begin-of-text, by its transformers tokenizer."""
    plain, whole = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
