"""Text to calibrate on that every machine with this package has: several kinds, so that none is read worse.

From the standard library of the user's Python come code, reference documentation, conversations about it, and
descriptions of its functions as tools in JSON (:mod:`oscar_tools.calibration.local_text`). What it does not have ships
in ``texts``: prose, several languages, code of other languages, what projects say of themselves, conversations about
other things. Some prompts are long documents of one kind.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from itertools import islice
from typing import Any

from oscar_tools.calibration import local_text
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.local_text import Messages, Render, plain_chat, renderer

LENGTH, LONG, SHORTEST = 800, 4096, 512
"""Tokens of a prompt at most, of a long document, and of one that is worth recording. Of 32,768 tokens every kind gets
two prompts or more, so that the end, which a fit chooses on, has all kinds, and long enough to choose by."""

CHARACTERS = 8
"""Of a token at most, nearly always."""
SEPARATOR = "-----\n"

Kind = Callable[[Render], Iterator[str]]


def source(render: Render) -> Iterator[str]:
    """Files of the standard library."""
    yield from local_text.python_sources().values()


def reference(render: Render) -> Iterator[str]:
    """Topics of the language reference."""
    yield from (text for _, text in local_text.reference_topics())


def library_chats(render: Render) -> Iterator[str]:
    """Conversations about the standard library."""
    yield from (text for _, text in local_text.conversations(local_text.python_sources(), partial(taken, render)))


def tools(render: Render) -> Iterator[str]:
    """Functions of a file of the standard library, as a chat model's tools are described in JSON."""
    for name, text in local_text.python_sources().items():
        if described := list(islice(_tools(name, text), 12)):
            yield json.dumps(described, indent=2)


def shipped(name: str, render: Render) -> Iterator[str]:
    """Documents of a file in ``texts``."""
    yield from _read(name).split(SEPARATOR)


def shipped_chats(render: Render) -> Iterator[str]:
    """Conversations that ship."""
    yield from (taken(render, messages) for messages in json.loads(_read("chats.json")))


KINDS: tuple[tuple[Kind, float, int], ...] = (
    (source, 0.12, LENGTH),
    (library_chats, 0.14, LENGTH),
    (tools, 0.07, LENGTH),
    (reference, 0.03, LENGTH),
    (partial(shipped, "readmes.txt"), 0.07, LENGTH),
    (partial(shipped, "prose.txt"), 0.06, LENGTH),
    (partial(shipped, "languages.txt"), 0.11, LENGTH),
    (partial(shipped, "code.txt"), 0.08, LENGTH),
    (shipped_chats, 0.14, LENGTH),
    (source, 0.09, LONG),
    (reference, 0.09, LONG),
)
"""Kind, its share of the tokens, tokens of a prompt of it at most."""


def taken(render: Render, messages: Messages) -> str:
    """A conversation as the model's template writes it, or plainly where the template does not take it."""
    try:
        return render(messages)
    except DataError:
        return plain_chat(messages)


def prompts(tokenizer: Any, tokens: int, longest: int) -> list[list[int]]:
    """Prompts of all kinds, as token ids.

    Args:
        tokenizer: of transformers.
        tokens: of all prompts, about.
        longest: tokens of a prompt at most.

    Returns:
        kinds by turns, so that the end of the list, which a fit chooses on, has all of them.
    """
    render = renderer(tokenizer)
    rows: list[tuple[float, list[int]]] = []
    used: dict[Kind, int] = {}
    for kind, share, length in KINDS:
        # A kind that comes twice goes on where it stopped.
        texts = islice(kind(render), used.get(kind, 0), None)
        pieces, read = _pieces(tokenizer, texts, int(tokens * share), min(length, longest))
        used[kind] = used.get(kind, 0) + read
        rows += [((n + 0.5) / len(pieces), ids) for n, ids in enumerate(pieces)]
    return [ids for _, ids in sorted(rows, key=lambda row: row[0])]


def _pieces(tokenizer: Any, texts: Iterable[str], budget: int, length: int) -> tuple[list[list[int]], int]:
    """Token ids of texts, short ones joined, in pieces of at most ``length``; and how many texts that took."""
    found: list[list[int]] = []
    piece: list[int] = []
    shortest = min(SHORTEST, length)
    total = read = 0
    for text in texts:
        read += 1
        said = text[: CHARACTERS * length]
        # What the model expects in front of a text comes once.
        piece += tokenizer.encode(f"\n\n{said}" if piece else said, add_special_tokens=not piece, verbose=False)
        if len(piece) >= min(length, budget - total):
            found.append(piece[: min(length, budget - total)])
            total, piece = total + len(found[-1]), []
            if total > budget - shortest:
                break
    kept = piece and (len(piece) >= shortest or not found)
    return ([*found, piece] if kept else found), read


def _tools(module: str, text: str) -> Iterator[dict[str, Any]]:
    """Public functions of a module that have a docstring and parameters."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if not isinstance(node, ast.FunctionDef) or not said or node.name.startswith("_"):
            continue
        names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
        required = names[: max(0, len(names) - len(node.args.defaults))]
        if names:
            properties = {name: {"type": "string", "description": f"The argument {name}."} for name in names}
            parameters = {"type": "object", "properties": properties, "required": required}
            facts = {"name": f"{module.removesuffix('.py').replace('/', '.')}.{node.name}", "description": said}
            yield {"type": "function", "function": facts | {"parameters": parameters}}


def _read(name: str) -> str:
    return resources.files("oscar_tools").joinpath("calibration", "texts", name).read_text(encoding="utf-8")
